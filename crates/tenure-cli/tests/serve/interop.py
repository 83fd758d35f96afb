"""What the client does that it has in common with those of today."""

import asyncio
import sys
import time

from dflockd import client, sync_client

SERVERS = [("127.0.0.1", int(sys.argv[1]))]


def lock(key, timeout=10, lease=None):
    return sync_client.DistributedLock(
        key, acquire_timeout_s=timeout, lease_ttl_s=lease, servers=SERVERS
    )


def one_after_the_other():
    first, second = lock("sync"), lock("sync", timeout=0)
    assert first.acquire() and first.lease == 33
    assert not second.acquire(), "it is held"
    first.release()
    with lock("sync", timeout=10, lease=5) as third:
        assert third.lease == 5
        assert len(third.token) == 32


def it_renews_by_itself():
    holder = lock("renewed", lease=2)
    assert holder.acquire()
    time.sleep(2.5)
    assert not lock("renewed", timeout=0).acquire(), "renewed at half its lease"
    holder.release()
    assert lock("renewed", timeout=0).acquire()


def two_phases():
    first, second = lock("phases"), lock("phases")
    assert first.enqueue() == "acquired"
    assert second.enqueue() == "queued"
    assert first.wait(1)
    first.release()
    assert second.wait(10)
    second.release()


async def asynchronous():
    reader, writer = await asyncio.open_connection(*SERVERS[0])
    token, lease = await client.acquire(reader, writer, "async", 10, 7)
    assert len(token) == 32 and lease == 7
    assert await client.renew(reader, writer, "async", token, 9) == 9
    other = client.DistributedLock("async", acquire_timeout_s=10, servers=SERVERS)
    waiting = asyncio.create_task(other.acquire())
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await client.release(reader, writer, "async", token)
    assert await waiting and other.token > token
    await other.release()
    writer.close()


one_after_the_other()
it_renews_by_itself()
two_phases()
asyncio.run(asynchronous())
