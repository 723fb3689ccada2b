"""Prints the words that `tl.philox` draws, as Triton's interpreter runs it. Arguments: seed position groups, repeated."""

import json
import sys

import torch
import triton
import triton.language as tl


@triton.jit
def _words_kernel(out_ptr, seed, position, BLOCK: tl.constexpr):
    groups = tl.arange(0, BLOCK).to(tl.uint32)
    zero = groups * 0
    lanes = tl.philox(seed, groups, zero + position.to(tl.uint32), zero, zero)
    for lane in tl.static_range(4):
        tl.store(out_ptr + groups * 4 + lane, lanes[lane].to(tl.int64))


def main(arguments):
    answers = []
    for seed, position, num_groups in zip(arguments[::3], arguments[1::3], arguments[2::3], strict=True):
        out = torch.zeros(num_groups, 4, dtype=torch.int64)
        _words_kernel[(1,)](out, seed, position, BLOCK=num_groups)
        answers.append(out.tolist())
    print(json.dumps(answers))


main([int(argument) for argument in sys.argv[1:]])
