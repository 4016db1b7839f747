"""Inference engines follow publications: transformers, and vLLM and SGLang by their interfaces.

Method: a small Llama is trained and published. After each update an engine generates what the
trainer's own bfloat16 weights generate. vLLM's modules stand in by the signatures of its sources
(vllm/distributed/weight_transfer/base.py and model_loader/reload), SGLang by a server that takes
the fields of its UpdateWeightFromDiskReqInput.
"""

from __future__ import annotations

import copy
import json
import sys
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import ckpt
from ckpt.errors import CheckpointError, NoCheckpoint

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from tests.integrations.test_huggingface import tiny_llama, trainer_of
pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers

PROMPT = torch.tensor([[1, 5, 9]])


def llama() -> Any:
    torch.manual_seed(3)
    return transformers.LlamaForCausalLM(tiny_llama()).eval()


def trained(model: Any, seed: int) -> None:
    """As far from before that other tokens follow."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn(parameter.shape, generator=generator) / 3


def generated(model: Any) -> list[int]:
    with torch.no_grad():
        made = model.generate(PROMPT, max_new_tokens=8, do_sample=False, pad_token_id=0)
    tokens: list[int] = made[0].tolist()
    return tokens


def test_transformers_generates_with_each_version(tmp_path: Path) -> None:
    model, served = llama(), llama().bfloat16()
    seen = set()
    with ckpt.follow(served, tmp_path, line="published") as follower:
        for step in (1, 2, 3):
            trained(model, step)
            report = ckpt.publish(model, tmp_path, step=step, anchor_larger=1e9).result()
            assert follower.poll() is not None
            follower.swap()
            assert follower.attempt == report.attempt
            tokens = generated(served)
            assert tokens == generated(copy.deepcopy(model).bfloat16())
            seen.add(tuple(tokens))
    assert len(seen) == 3


# vLLM ---------------------------------------------------------------------------------------


class Engine(ABC):
    """The part of vLLM's WeightTransferEngine that calls a subclass, and what one has to have."""

    @abstractmethod
    def init_transfer_engine(self, init_info: Any) -> None: ...

    @abstractmethod
    def start_weight_update(self) -> None: ...

    @abstractmethod
    def finish_weight_update(self) -> None: ...

    @abstractmethod
    def receive_weights(self, update_info: Any) -> None: ...

    @abstractmethod
    def shutdown(self) -> None: ...

    @staticmethod
    @abstractmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None: ...

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        self.model, self.model_config = model, vllm_config.model_config

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.update_info_cls(**update_info))  # type: ignore[attr-defined]


class Worker:
    """A model of a worker: it takes weights between the calls that prepare and end a reload."""

    def __init__(self) -> None:
        self.model, self.calls = llama().bfloat16(), list[str]()

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        assert self.calls[-1] == "initialize"
        own = self.model.state_dict()
        for name, tensor in weights:
            own.pop(name).copy_(tensor)
        assert not own
        self.calls.append("load")


@pytest.fixture
def engine_class(monkeypatch: pytest.MonkeyPatch) -> Any:
    base = ModuleType("vllm.distributed.weight_transfer.base")
    empty = dataclass(type("Info", (), {}))
    base.__dict__.update(
        WeightTransferEngine=Engine, WeightTransferInitInfo=empty, WeightTransferUpdateInfo=empty
    )
    reload = ModuleType("vllm.model_executor.model_loader.reload")
    reload.__dict__.update(
        initialize_layerwise_reload=lambda model: model.calls.append("initialize"),
        finalize_layerwise_reload=lambda model, config: model.calls.append("finalize"),
    )
    for module in (base, reload):
        parts = module.__name__.split(".")
        for end in range(1, len(parts)):
            name = ".".join(parts[:end])
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "ckpt.integrations.vllm", raising=False)
    from ckpt.integrations.vllm import FollowingEngine

    yield FollowingEngine
    sys.modules.pop("ckpt.integrations.vllm", None)


def test_a_vllm_worker_has_each_version(tmp_path: Path, engine_class: Any) -> None:
    model, worker = llama(), Worker()
    engine = engine_class(None, SimpleNamespace(model_config=None), torch.device("cpu"), worker)
    engine.init_transfer_engine(engine_class.init_info_cls(url=str(tmp_path), prefix="policy."))
    for step, wanted in ((1, {}), (2, {"step": 2}), (5, {"step": 4})):
        trained(model, step)
        ckpt.publish({"policy": model}, tmp_path, step=step, anchor_larger=1e9).result()
        engine.start_weight_update()
        engine.update_weights(wanted)
        engine.finish_weight_update()
        assert worker.calls[-3:] == ["initialize", "load", "finalize"]
        assert generated(worker.model) == generated(copy.deepcopy(model).bfloat16())
    with pytest.raises(NoCheckpoint, match="step 9 was not published in time; the newest is 5"):
        engine.update_weights({"step": 9, "seconds_max": 0.01})
    # Of a training that went back: step 5 is of the steps that it has given up.
    with pytest.raises(NoCheckpoint, match="step 3 was not published in time; the newest is 5"):
        engine.update_weights({"step": 3, "seconds_max": 0.01})
    trained(model, 9)
    ckpt.publish({"policy": model}, tmp_path, step=3, anchor_larger=1e9).result()
    engine.start_weight_update()
    engine.update_weights({"step": 3})
    assert generated(worker.model) == generated(copy.deepcopy(model).bfloat16())
    engine.shutdown()


def test_a_served_folder_with_other_weights_is_refused(tmp_path: Path) -> None:
    from ckpt.integrations.sglang import SGLangUpdates

    (tmp_path / "model.safetensors").touch()  # of an earlier run
    SGLangUpdates(tmp_path / "run", "http://localhost:1", tmp_path).follower.close()
    for name in ("model.safetensors.index.json", "model-00001-of-00002.safetensors"):
        (tmp_path / name).touch()
        with pytest.raises(CheckpointError, match=f"has {name}; remove it"):
            SGLangUpdates(tmp_path / "run", "http://localhost:1", tmp_path)
        (tmp_path / name).unlink()


# SGLang -------------------------------------------------------------------------------------


@dataclass
class Request:
    """The fields of UpdateWeightFromDiskReqInput that we use."""

    model_path: str
    weight_version: str | None = None


@dataclass
class Server:
    url: str
    model: Any
    refuses: bool = False
    version: str | None = None


@pytest.fixture
def server() -> Iterator[Server]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/update_weights_from_disk"
            body = self.rfile.read(int(self.headers["Content-Length"]))
            request = Request(**json.loads(body))
            done = not known.refuses
            if done:
                known.model = transformers.LlamaForCausalLM.from_pretrained(request.model_path)
                known.version = request.weight_version
            self.send_response(200 if done else 400)
            self.end_headers()
            said = {"success": done, "message": "" if done else "out of memory"}
            self.wfile.write(json.dumps(said).encode())

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        known = Server(f"http://127.0.0.1:{listening.server_port}", None)
        yield known
        listening.shutdown()


@pytest.mark.server
def test_an_sglang_server_takes_each_version(tmp_path: Path, server: Server) -> None:
    from ckpt.integrations.sglang import SGLangUpdates

    model, root, folder = llama(), tmp_path / "run", tmp_path / "served"
    model.config.save_pretrained(folder)
    with SGLangUpdates(root, server.url, folder) as updates:
        assert updates.step() is None
        for step in (1, 2):
            trained(model, step)
            report = ckpt.publish(model, root, step=step, anchor_larger=1e9).result()
            server.refuses = step == 2
            if server.refuses:
                with pytest.raises(CheckpointError, match=r"has not taken step 2: .*out of memory"):
                    updates.step()
                server.refuses = False
            assert updates.step() == step
            assert updates.step() is None
            assert server.version == report.attempt
            assert generated(server.model.bfloat16()) == generated(copy.deepcopy(model).bfloat16())


# trainers -----------------------------------------------------------------------------------


def test_a_trainer_publishes_its_steps(tmp_path: Path) -> None:
    from ckpt.integrations.huggingface import TrainerPublications

    root = tmp_path / "run"
    trainer = trainer_of(tmp_path, TrainerPublications(str(root), every=4, anchor_larger=1e9))
    trainer.train()
    served = copy.deepcopy(trainer.model).bfloat16()
    for parameter in served.parameters():
        torch.nn.init.zeros_(parameter)
    with ckpt.follow(served, root, line="published") as follower:
        follower.poll()
        follower.swap()
        assert follower.step == trainer.state.global_step // 4 * 4 > 4
        if follower.step == trainer.state.global_step:
            for one, other in zip(served.parameters(), trainer.model.parameters(), strict=True):
                assert torch.equal(one, other.bfloat16())


def test_a_trl_trainer_publishes_its_steps(tmp_path: Path) -> None:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    tokenizers = pytest.importorskip("tokenizers")
    from ckpt.integrations.huggingface import TrainerPublications

    words = {word: number for number, word in enumerate(["[UNK]", "[PAD]", "a", "b", "c"])}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, unk_token="[UNK]", pad_token="[PAD]", eos_token="[PAD]"
    )
    arguments = trl.GRPOConfig(
        output_dir=str(tmp_path),
        max_steps=3,
        per_device_train_batch_size=2,
        num_generations=2,
        max_completion_length=4,
        learning_rate=0.05,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
    )
    trainer = trl.GRPOTrainer(
        model=llama(),
        args=arguments,
        reward_funcs=lambda completions, **_: [float(text.count("b")) for text in completions],
        train_dataset=datasets.Dataset.from_dict({"prompt": ["a b", "b c", "c a"]}),
        processing_class=tokenizer,
        callbacks=[TrainerPublications(str(tmp_path / "run"), anchor_larger=1e9)],
    )
    trainer.train()
    served = llama().bfloat16()
    with ckpt.follow(served, tmp_path / "run", line="published") as follower:
        follower.poll()
        follower.swap()
        assert follower.step == 3
    for one, other in zip(served.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(one, other.bfloat16())
