"""A model that repeats its prompt and then ends; every token is a byte. Fast, and its text is known."""

import asyncio

import numpy as np

from pagewire.local.engine import Engine
from pagewire.local.text_side import TextSide
from pagewire.step.step import LogprobRows, PromptLogprobRows, SampleFlag, StepResult
from pagewire.text.text_model import TextModel
from pagewire.worker.interface import WorkerShape
from pagewire_client.text.byte_table import ByteTable

EOS = 0
MAX_LEN = 256


class EchoWorker:
    """Token i of the output is token i of the prompt; after the last one comes EOS. `delay_s`: how long a step takes."""

    def __init__(self, *, delay_s=0.0, max_rows=8):
        self.shape = WorkerShape(
            num_blocks=129,
            block_size=16,
            max_rows=max_rows,
            max_model_len=MAX_LEN,
            vocab_size=256,
            eos_ids=(EOS,),
            kv_bytes=0,
            model_name="echo",
        )
        self.delay_s = delay_s
        self.fault = None
        self.num_steps = 0
        self.is_closed = False
        self._rows = {}
        self._done = {}

    def launch_forward(self, plan):
        for join in plan.joins:
            self._rows[join.row] = join
            self._done[join.row] = False
        future = asyncio.get_running_loop().create_future()
        future.set_result(None)
        return future

    async def launch_sample(self, plan, masks=None):
        await asyncio.sleep(self.delay_s)
        if self.fault is not None:
            raise self.fault
        self.num_steps += 1
        counts, tokens, flags, logprobs = [], [], [], []
        for s, (entry, row) in enumerate(zip(plan.sample_entries.tolist(), plan.sample_rows.tolist(), strict=True)):
            join = self._rows[row]
            if self._done[row]:
                counts.append(0)
                flags.append(SampleFlag.DROPPED)
                continue
            index = int(plan.starts[entry] + plan.num_tokens[entry]) - join.prompt_ids.size
            token = int(join.prompt_ids[index]) if index < join.prompt_ids.size else EOS
            self._done[row] = token in (*join.eos_ids, *join.params.stop_token_ids)
            counts.append(1)
            tokens.append(token)
            flags.append(SampleFlag.STOPPED if self._done[row] else SampleFlag.OK)
            if join.params.logprobs is not None:
                logprobs.append((s, token, join.params.logprobs))
        result = StepResult(
            plan.step, np.array(counts, np.int32), np.array(tokens, np.int32), np.array(flags, np.uint8)
        )
        if logprobs:
            result.logprobs = self._logprobs(logprobs)
        result.prompt_logprobs = [
            self._prompt_logprobs(plan, entry, top) for entry, top in plan.prompt_logprobs.items()
        ]
        return result

    def _logprobs(self, asked):
        """The log-probability of token t is −t / 8; alternatives are t + 1, t + 2, …"""
        tops = [(token + 1 + i) for _, token, top in asked for i in range(top)]
        return LogprobRows(
            samples=np.array([s for s, _, _ in asked], np.int32),
            chosen=np.array([-token / 8 for _, token, _ in asked], np.float32),
            top=np.array([top for _, _, top in asked], np.int32),
            top_ids=np.array(tops, np.int32),
            top_logprobs=np.array([-t / 8 for t in tops], np.float32),
        )

    def _prompt_logprobs(self, plan, entry, top):
        prompt = self._rows[int(plan.rows[entry])].prompt_ids
        start, num = int(plan.starts[entry]), int(plan.num_tokens[entry])
        next_ids = prompt[start + 1 : start + num + 1]
        return PromptLogprobRows(
            entry=entry,
            start=start,
            chosen=(-next_ids / 8).astype(np.float32),
            top_ids=np.repeat(next_ids[:, None] + 1, top, axis=1).astype(np.int32),
            top_logprobs=np.zeros((next_ids.size, top), np.float32),
        )

    async def close(self):
        self.is_closed = True


class ByteText:
    """The text side of that model."""

    chat_renderer = None

    def __init__(self):
        self.byte_table = ByteTable(tuple(bytes([i]) for i in range(256)), special=frozenset({EOS}))
        self.before_encode = lambda text: None
        self.chats = []

    refuse_too_long = TextModel.refuse_too_long

    def encode(self, text, *, max_tokens, field="prompt"):
        self.refuse_too_long(len(text), max_tokens, field)
        self.before_encode(text)
        return list(text.encode())

    def encode_chat(self, messages, *, template_kwargs, max_tokens):
        self.chats.append((messages, template_kwargs))
        text = "|".join(f"{m['role']}:{m['content']}" for m in messages)
        return self.encode(text, max_tokens=max_tokens, field="messages")


class EchoEngine(Engine):
    """An engine around that model."""

    def __init__(self, *, delay_s=0.0, has_text=True, **options):
        self.echo = EchoWorker(delay_s=delay_s)
        self.bytes = ByteText()
        text = TextSide(self.bytes if has_text else None)
        super().__init__(worker=self.echo, text=text, max_rows=8, seed=7, **options)

    @property
    def core(self):
        return self._core
