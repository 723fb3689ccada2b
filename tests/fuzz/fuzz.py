"""Mutated frames by the million against the doors of a whole server, gateway and engine as processes (F11).

    python tests/fuzz/fuzz.py --frames 1000000

Half of the frames go to the gateway's door, half to the engine's, each from a process of its own. Meanwhile a healthy client
streams over each door, and every stream must have exactly its tokens. At the end: no part was restarted, nothing was
logged as a fault, every answer was a message, connections and streams are back to nothing but the neighbours', and memory
has not grown since a fifth of the frames was through.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import zmq
from tests.chaos.rig import Served, temporary_folder
from tests.fuzz.mutate import Mutator

import pagewire_client
from pagewire.cli.model_path import demo_model
from pagewire_transport.codec import MAX_REPLY_BYTES, decode_server, encode
from pagewire_transport.messages import Goodbye, Hello, Ping

A_CONNECTION = 40
ANSWER_MS = 20_000
WARM_SHARE = 0.2
MAX_GROWTH = 32 * 2**20
PROMPT = list(range(1000, 1020))
FLAGS = (
    "--name", "vocab=49152 latency_us=200", "--max-model-len", "8192", "--kv-bytes", str(2**20),
    "--heartbeat-ms", "500", "--heartbeat-timeout-ms", "5000", "--resume-grace-ms", "300", "--log-level", "info",
)  # fmt: skip


def throw(url: str, num: int, seed: int) -> None:
    """The other process: sends, reads and checks that what comes back are messages. Prints the number thrown so far."""
    source = Mutator(seed)
    context = zmq.Context()
    control = context.socket(zmq.DEALER)
    control.connect(url)
    control.send(encode(Hello()))
    thrown = 0
    while thrown < num:
        # One connection after the other has been dealt with: what is measured is growth, not a backlog, which is bounded
        # by the file descriptors that the server may open.
        control.send(encode(Ping()))
        assert control.poll(ANSWER_MS), "the door answers nobody any more"
        decode_server(control.recv())
        with context.socket(zmq.DEALER) as peer:
            peer.linger = 0
            peer.connect(url)
            if source.random.random() < 0.95:
                peer.send(encode(Hello()))
            for _ in range(min(A_CONNECTION, num - thrown)):
                if source.random.random() < 0.01:
                    peer.send_multipart(source.parts())
                else:
                    peer.send(source.frame())
                thrown += 1
            if source.random.random() < 0.8:
                while peer.poll(3):
                    decode_server(peer.recv(), MAX_REPLY_BYTES)
            if source.random.random() < 0.8:
                peer.send(encode(Goodbye()))
                peer.linger = 100
        print(thrown, flush=True)
    control.close(0)


async def neighbour(url: str, seen: list[int], stop: asyncio.Event) -> None:
    """Streams without end; the engine repeats the prompt, so every token is known."""
    async with pagewire_client.connect(url, timeout_s=20) as client:
        while not stop.is_set():
            stream = client.generate(PROMPT, max_tokens=20, seed=20, ignore_eos=True, priority=100, echo_text=False)
            ids = list((await stream.result()).token_ids)
            assert ids == PROMPT, f"tokens of a neighbour: {ids}"
            seen.append(len(ids))
            await asyncio.sleep(0.01)


async def run(num: int, seed: int) -> dict[str, float]:
    """Figures; raises if anything is not as it should be."""
    with temporary_folder() as folder:
        model = demo_model()
        server = await Served.start(folder, *FLAGS, model=str(model or ""))
        try:
            url = await server.ready(120)
            (engine_socket,) = folder.glob("pagewire-*/*/engine.sock")
            doors = {"gateway": url, "engine": f"ipc://{engine_socket}"}
            seen: dict[str, list[int]] = {name: [] for name in doors}
            stop = asyncio.Event()
            neighbours = [asyncio.create_task(neighbour(doors[name], seen[name], stop)) for name in doors]
            began = time.monotonic()
            throwers = [
                await asyncio.create_subprocess_exec(
                    sys.executable, __file__, "--throw", door, "--frames", str(num // 2), "--seed", str(seed + index),
                    stdout=asyncio.subprocess.PIPE,
                )
                for index, door in enumerate(doors.values())
            ]  # fmt: skip
            parts = {name: server.part(name) for name in doors}
            before: dict[str, int] = {}
            rss: dict[str, list[int]] = {name: [] for name in doors}

            async def follow(name: str, thrower: asyncio.subprocess.Process) -> None:
                assert thrower.stdout is not None
                while line := await thrower.stdout.readline():
                    rss[name].append(parts[name].memory_info().rss >> 20)
                    if name not in before and int(line) > WARM_SHARE * num / 2:
                        before[name] = parts[name].memory_info().rss
                assert await thrower.wait() == 0, f"the thrower at the {name}: an answer was no message"

            await asyncio.gather(*(follow(name, one) for name, one in zip(doors, throwers, strict=True)))
            seconds = time.monotonic() - began
            figures = {"frames": num, "seconds": round(seconds, 1), "frames_per_s": round(num / seconds)}
            await asyncio.sleep(6)  # heartbeats find who broke off, and the grace of their streams is over
            for name, part in parts.items():
                assert server.part(name).pid == part.pid, f"the {name} was restarted"
                print(name, rss[name][:: max(1, len(rss[name]) // 20)], "MiB", flush=True)
                grown = part.memory_info().rss - before[name]
                figures[f"{name}_grown_mib"] = round(grown / 2**20, 1)
                assert grown < MAX_GROWTH, f"the {name} has grown by {grown} bytes"
            stop.set()
            await asyncio.gather(*neighbours)
            async with pagewire_client.connect(url) as client:
                await asyncio.sleep(0.7)
                stats = await client.stats()
            for name in ("gateway_connections", "gateway_streams", "sequences_running", "sequences_waiting"):
                assert stats.get(name, 0) <= 1, f"{name}: {stats[name]}"
            figures |= {f"{name}_neighbour_streams": len(ids) for name, ids in seen.items()}
            assert await server.stop() == 0
            faults = [line for line in server.lines if "fault" in line or "Traceback" in line or "level=error" in line]
            assert faults == [], faults[:5]
            return figures
        except BaseException:
            worth_reading = [line for line in server.lines if "level=info" not in line]
            print("\n".join([*worth_reading[:100], *server.lines[-10:]]), file=sys.stderr)
            raise
        finally:
            await server.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--throw", metavar="URL", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.throw:
        throw(given.throw, given.frames, given.seed)
        return
    print(" ".join(f"{name}={value}" for name, value in asyncio.run(run(given.frames, given.seed)).items()))


if __name__ == "__main__":
    main()
