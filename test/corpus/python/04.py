import asyncio
import logging
import time

log = logging.getLogger(__name__)


class RateLimiter:
    """Allows a number of calls per period and lets the others wait."""

    def __init__(self, calls, period):
        self.calls = calls
        self.period = period
        self.stamps = []
        self.lock = asyncio.Lock()

    async def __aenter__(self):
        async with self.lock:
            now = time.monotonic()
            self.stamps = [s for s in self.stamps if now - s < self.period]
            if len(self.stamps) >= self.calls:
                delay = self.period - (now - self.stamps[0])
                log.debug("waiting for %.3f seconds", delay)
                await asyncio.sleep(delay)
            self.stamps.append(time.monotonic())
        return self

    async def __aexit__(self, kind, value, traceback):
        return False


async def fetch_all(client, urls):
    limiter = RateLimiter(calls=10, period=1.0)

    async def fetch(url):
        async with limiter:
            response = await client.get(url)
            response.raise_for_status()
            return response.json()

    return await asyncio.gather(*(fetch(url) for url in urls))
