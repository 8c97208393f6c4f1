from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm

import kindred_vllm
from kindred_vllm import versions


@pytest.mark.parametrize("version", ["0.27.0", "0.32.1.dev3+gabc", "0.33.0"])
def test_versions_it_was_written_for(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(versions.ANY_VERSION, raising=False)
    versions.check(version)


@pytest.mark.parametrize("version", ["0.26.9", "0.34.0", "1.0.0", "dev"])
def test_others_are_refused_unless_told_otherwise(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(versions.ANY_VERSION, raising=False)
    with pytest.raises(versions.UnsupportedVersion, match="kindred-vllm"):
        versions.check(version)
    monkeypatch.setenv(versions.ANY_VERSION, "1")
    versions.check(version)


def test_every_entry_point_refuses_an_unknown_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(versions.ANY_VERSION, raising=False)
    monkeypatch.setattr(vllm, "__version__", "0.34.0")
    for name in ("connector", "scheduler"):
        monkeypatch.delitem(sys.modules, f"kindred_vllm.{name}", raising=False)
        with pytest.raises(versions.UnsupportedVersion, match=r"knows vLLM 0\.27 to 0\.33, this is 0\.34\.0"):
            importlib.import_module(f"kindred_vllm.{name}")
    monkeypatch.setenv("KINDRED_VLLM_EPLB", "1")
    with pytest.raises(versions.UnsupportedVersion):
        kindred_vllm.register()


def test_eplb_without_the_method_that_it_needs_changes_nothing() -> None:
    with pytest.raises(versions.UnsupportedVersion, match="_allreduce_list"):
        versions.eplb_allreduce(object)


def layer(monolithic: bool, experts: Any = None) -> Any:
    router = SimpleNamespace(set_capture_fn=lambda fn: seen.append(fn))
    seen: list[Any] = []
    method = SimpleNamespace(
        is_monolithic=monolithic, moe_kernel=SimpleNamespace(impl=SimpleNamespace(fused_experts=experts))
    )
    return SimpleNamespace(router=router, quant_method=method, routed_experts=SimpleNamespace(), seen=seen)


def test_routers_get_the_capture_function() -> None:
    modular = layer(monolithic=False)
    versions.set_capture(modular, print)
    assert modular.seen == [print]


def test_kernels_that_route_by_themselves_are_refused() -> None:
    with pytest.raises(versions.NotCapturable, match="monolithic"):
        versions.set_capture(layer(monolithic=True, experts=object()), print)
    silent = SimpleNamespace(supports_routing_replay_capture=lambda: False, set_capture_fn=print)
    with pytest.raises(versions.NotCapturable, match="monolithic"):
        versions.set_capture(layer(monolithic=True, experts=silent), print)


def test_kernels_that_say_what_they_chose_are_asked() -> None:
    seen: list[Any] = []
    old = SimpleNamespace(supports_routing_replay_capture=lambda: True, set_capture_fn=seen.append)
    versions.set_capture(layer(monolithic=True, experts=old), print)
    assert seen == [print]
    moe = SimpleNamespace(
        use_ep=False, ep_size=1, dp_size=1, max_num_tokens=4, experts_per_token=2, device=torch.device("cpu")
    )
    new = SimpleNamespace(supports_routing_replay_capture=lambda: True, moe_config=moe)
    of_new = layer(monolithic=True, experts=new)
    versions.set_capture(of_new, print)
    assert of_new.routed_experts.routing_sink.capture_fn is print


def test_slots_come_from_the_forward_context_or_from_the_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import forward_context

    assert versions.slot_mapping({}, ["a"]) is None
    assert versions.slot_mapping({"attn_metadata": {"b": SimpleNamespace(slot_mapping=7)}}, ["a", "b"]) == 7
    context = SimpleNamespace(slot_mapping={"a": 5})
    monkeypatch.setattr(forward_context, "_forward_context", context)
    assert versions.slot_mapping({}, ["a"]) == 5
