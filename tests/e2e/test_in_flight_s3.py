"""A load from a far S3 has several requests in flight, and no more than its memory allows.

Method: a proxy counts them; the first ones are answered when all of them are there.
"""

from __future__ import annotations

import itertools
import threading

import pytest
import torch

import ckpt
import ckpt.api as api
from ckpt.loading.plan import ReadPath
from tests.counting import AtOnce
from tests.fault_proxy import Request, fault_proxy
from tests.servers import S3Server, moto_server

pytestmark = pytest.mark.server


def test_requests_in_flight_stay_between_the_least_and_the_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = {f"layer{n}": torch.arange(n, n + 5000) for n in range(60)}
    expected = {name: tensor.clone() for name, tensor in state.items()}
    with moto_server() as moto, fault_proxy(moto.endpoint_url, rate=0.0) as proxy:
        url = f"s3://{moto.make_bucket()}/run"
        options = S3Server(proxy.endpoint_url).options
        ckpt.save(state, url, step=1, storage_options=options)
        least, most = api.REMOTE_REQUESTS, 2 * api.REMOTE_REQUESTS
        together, numbers = threading.Barrier(least, timeout=60), itertools.count()

        def rule(request: Request) -> str:
            if ".safetensors" in request.path and next(numbers) < least:
                together.wait()
            return ""

        path = ReadPath(4096, gap_nbytes_max=0, readers=least, readers_max=most)
        monkeypatch.setattr(api, "read_path", lambda *_: path)
        proxy.rule, proxy.delay_seconds, proxy.in_flight = rule, 0.01, AtOnce()
        for tensor in state.values():
            tensor.zero_()
        ckpt.load(state, url, storage_options=options)
        assert all(torch.equal(state[name], expected[name]) for name in state)
        reads = [request for request in proxy.requests if request.method == "GET"]
        ranges = [request.headers["range"] for request in reads if "range" in request.headers]
        assert len(set(ranges)) > 4 * most
        # A loaded machine may have sent some of them a second time.
        assert least <= proxy.in_flight.most <= most + len(ranges) - len(set(ranges))
