"""The scheduler tests' checking device as a worker: every read of KV is checked, steps end as late as one likes."""

import asyncio

from device import EOS, VOCAB, Device

from pagewire.worker.interface import WorkerShape

BLOCK = 16


class DeviceWorker:
    """Steps end in order, each `delay()` turns of the loop after it could begin; none while `is_held`.

    A check of the device that fails is an exception of the handle, hence a fault of the engine, which tests look for.
    """

    def __init__(self, *, num_blocks=65, max_rows=8, max_model_len=512, delay=lambda: 1):
        self.device = Device(num_blocks, BLOCK)
        self.shape = WorkerShape(
            num_blocks=num_blocks,
            block_size=BLOCK,
            max_rows=max_rows,
            max_model_len=max_model_len,
            vocab_size=VOCAB,
            eos_ids=(EOS,),
            kv_bytes=0,
            model_name="device",
        )
        self.delay = delay
        self.is_held = False
        self.num_steps = 0
        self.num_tokens = []  # of each step
        self._queue = asyncio.Queue()
        self._released = asyncio.Event()
        self._task = None

    def launch_forward(self, plan):
        self.device.submit(plan)
        self.num_tokens.append(plan.total_tokens)
        self._forward = asyncio.get_running_loop().create_future()
        return self._forward

    def launch_sample(self, plan, masks=None):
        if self._task is None:
            self._task = asyncio.create_task(self._compute())
        sample = asyncio.get_running_loop().create_future()
        self._queue.put_nowait((self._forward, sample))
        return sample

    def hold(self):
        self.is_held = True
        self._released.clear()

    def release(self):
        self.is_held = False
        self._released.set()

    def release_all(self):
        self.release()

    async def _compute(self):
        while True:
            forward, sample = await self._queue.get()
            for _ in range(self.delay()):
                await asyncio.sleep(0)
            while self.is_held:
                await self._released.wait()
            self.num_steps += 1
            try:
                result = self.device.complete()
            except Exception as error:
                sample.set_exception(error)
                return
            forward.set_result(None)
            sample.set_result(result)

    @property
    def is_closed(self):
        return self._task is None or self._task.done()

    async def close(self):
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
