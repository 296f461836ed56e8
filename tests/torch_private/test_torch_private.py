"""What is needed of each of torch's private names, so that a release without it fails here, by name."""

import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef

from meshwright.torch_private import arithmetic, attention, autograd, compiler, pipelining, processes, sharding
from meshwright.verify import run_ranks


def test_attention_returns_its_log_sum_exp_and_a_backward_takes_it() -> None:
    q, k, v = (torch.randn(2, 3, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    out, lse = attention.cpu_flash(q, k, v, 0.0, True)
    scores = (q @ k.transpose(-1, -2) / 2).masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))
    torch.testing.assert_close(out, scores.softmax(-1) @ v)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    ours = attention.cpu_flash_backward(2 * out, q, k, v, out, lse, 0.0, True)
    for mine, theirs in zip(ours, grads, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("name", ["varlen_flash", "varlen_flash_backward"])
def test_the_kernels_for_packed_sequences_are_there(name: str) -> None:
    arguments = [argument.name for argument in getattr(attention, name).default._schema.arguments]
    assert {"cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal"} <= set(arguments)


@pytest.mark.parametrize("name", ["cudnn_attention", "cudnn_attention_backward"])
def test_cudnn_s_kernels_have_their_log_sum_exp(name: str) -> None:
    schema = getattr(attention, name).default._schema
    assert "logsumexp" in {each.name for each in (*schema.arguments, *schema.returns)}
    assert {"query", "key", "value", "dropout_p", "is_causal"} <= {each.name for each in schema.arguments}


def test_many_tensors_at_once() -> None:
    tensors = [torch.ones(3), torch.full((2, 2), 2.0)]
    arithmetic.foreach_mul_(tensors, 3.0)
    assert [float(norm) for norm in arithmetic.foreach_norm(tensors, 2, torch.float64)] == [27**0.5, 12.0]
    arithmetic.foreach_copy_(tensors, [torch.zeros(3), torch.zeros(2, 2)])
    assert not any(tensor.any() for tensor in tensors)


@pytest.mark.gpu
def test_a_gpu_is_made_to_wait() -> None:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    arithmetic.sleep_on_gpu(10_000_000)
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) > 3


def test_products_in_fp8_have_a_scale_for_each_side() -> None:
    arguments = [str(argument.name) for argument in torch.ops.aten._scaled_mm.default._schema.arguments]
    assert arguments[:4] == ["self", "mat2", "scale_a", "scale_b"] and "use_fast_accum" in arguments
    assert arithmetic.scaled_mm is torch._scaled_mm


def test_a_cpu_says_what_it_multiplies() -> None:
    assert {arithmetic.cpu_multiplies(dtype) for dtype in (torch.bfloat16, torch.float16)} <= {True, False}
    assert not arithmetic.cpu_multiplies(torch.int8)


def test_a_backward_is_known_from_inside_and_at_its_end() -> None:
    seen: list[Any] = []
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: seen.append(autograd.in_backward()))
    y.register_hook(lambda _: autograd.at_end_of_backward(lambda: seen.append("end")))
    assert not autograd.in_backward()
    y.sum().backward()
    assert seen == [True, "end"]


def test_storages_are_known_by_a_number_and_forgotten_when_they_are_gone() -> None:
    tensor = torch.ones(4)
    view = tensor[1:]
    assert autograd.base_of(view) is tensor and autograd.base_of(tensor) is tensor
    storage = tensor.untyped_storage()
    assert autograd.storage_key(storage) == autograd.storage_key(view.untyped_storage())
    reference = StorageWeakRef(storage)
    found = autograd.storage_of_reference(reference)
    assert found is not None and found.nbytes() == 16
    del tensor, view, storage, found
    assert autograd.storage_of_reference(reference) is None


def test_what_a_call_of_a_module_ends_in_is_known() -> None:
    module = nn.Linear(2, 2)
    assert autograd.call_attribute(module, "forward") == "forward"
    module.compile(backend="eager")
    assert callable(getattr(module, autograd.call_attribute(module, "forward")))
    assert autograd.call_attribute(module, "forward") != "forward"


def test_operations_are_seen_one_by_one() -> None:
    class Seen(autograd.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    names: list[str] = []
    with Seen():
        torch.ones(2) + 1
    assert any("add" in name for name in names)
    assert list(autograd.tree_iter([1, {"a": (2, 3)}])) == [1, 2, 3]
    assert not autograd.is_traceable_wrapper_subclass(torch.ones(1))


def _sharded() -> dict[str, Any]:
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    module = nn.Sequential(nn.Linear(4, 4, bias=False))
    inner = fully_shard(module[0], mesh=mesh)
    sharding.gather_in_background(fully_shard(module, mesh=mesh))
    [group] = sharding.parameter_groups(inner)
    before = sharding.is_gathering(group)
    module[0].unshard(async_op=True)
    during = sharding.is_gathering(group)
    module(torch.ones(1, 4)).sum().backward()
    [parameter] = group.fsdp_params
    weight = distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0)])
    return {
        "gathering": (before, during),
        "bytes": sharding.shard_bytes(parameter),
        "accumulated": hasattr(parameter, "unsharded_accumulated_grad"),
        "local": sharding.local_tensor(weight).shape,
        "plain": sharding.local_tensor(torch.ones(3)).shape,
        "spec": sharding.spec_of(weight).placements == (Shard(0),) and sharding.spec_of(torch.ones(1)) is None,
        "coming": issubclass(sharding.AsyncCollectiveTensor, Tensor),
    }


def test_shards_and_their_groups() -> None:
    for seen in run_ranks(_sharded, 2):
        assert seen == {
            "gathering": (False, True),
            "bytes": 32,
            "accumulated": True,
            "local": torch.Size([2, 2]),
            "plain": torch.Size([3]),
            "spec": True,
            "coming": True,
        }


def test_the_pipeline_runtime_takes_actions_of_our_own() -> None:
    kind = pipelining.ComputationType
    forward, backward = pipelining.Action(0, kind.FORWARD, 0), pipelining.Action(0, kind.FULL_BACKWARD, 0)
    order = pipelining.add_reduce_grad([*pipelining.add_unshard_reshard([forward, backward])], 1)
    kinds = [action.computation_type for action in order if action is not None]
    assert kinds.index(kind.UNSHARD) < kinds.index(kind.FORWARD) < kinds.index(kind.REDUCE_GRAD)
    sent = {0: [forward, pipelining.Action(0, kind.SEND_F, 0), backward]}
    waits = [action for action in pipelining.with_send_waits(sent)[0] if action not in sent[0]]
    assert len(waits) == int(hasattr(kind, "WAIT_SEND_F"))
    needed = ("_prepare_schedule_with_comms", "step")
    assert all(hasattr(pipelining.PipelineRuntime, name) for name in needed)


def test_the_compiler_is_found_and_told() -> None:
    compiler.preload()
    assert compiler.find_cpp_compiler()

    operation, key = torch.ops.aten.trace.default, torch._C.DispatchKey.Meta
    before = operation.py_kernels.get(key)
    try:
        compiler.set_shapes(operation, lambda x: x.new_empty(7))
        with FakeTensorMode() as fake, enable_python_dispatcher():
            assert operation(fake.from_tensor(torch.ones(3, 3))).shape == (7,)
    finally:
        operation.py_kernels.pop(key) if before is None else operation.py_kernels.update({key: before})
        operation._dispatch_cache.clear()


def _kernel_of_a_cheap_compiler() -> tuple[bool, int]:
    """Whether a kernel's C++ has vectors, and how many processes and threads may compile."""
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile

    sources: list[str] = []

    def compile_nothing(compiler: AsyncCompile, types: list[str], source: str) -> Callable[..., None]:
        sources.append(source)
        return lambda *_: None

    config.cpp.vec_isa_ok = True  # as on most CPUs, whatever the tests have chosen
    compiler.generate_plain_code()
    with pytest.MonkeyPatch.context() as patch, config.patch(force_disable_caches=True):
        patch.setattr(AsyncCompile, "cpp_pybinding", compile_nothing)
        torch.compile(lambda x: x.exp() * 3)(torch.ones(64))
    [source] = sources
    return "Vectorized" in source, config.compile_threads


def test_code_for_a_few_calls_is_plain() -> None:
    assert run_ranks(_kernel_of_a_cheap_compiler, 1) == [(False, 1)]


@pytest.fixture
def no_machine_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs go through the whole compiler, whose C++ is not compiled: kernels compute nothing."""
    from torch._inductor.async_compile import AsyncCompile

    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *_: lambda *_: None)


@pytest.mark.thorough
@pytest.mark.usefixtures("no_machine_code")
def test_a_pass_sees_the_compiler_s_graph() -> None:
    from meshwright.torch_private import graph_passes

    class Seen(graph_passes.CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            graphs.append(graph)

        def uuid(self) -> None:
            return None

    graphs: list[torch.fx.Graph] = []
    before = graph_passes.config.joint_custom_pre_pass
    try:
        graph_passes.set_joint_pass(Seen())
        x = torch.ones(3, requires_grad=True)
        torch.compile(lambda value: (value * 2).sum())(x).backward()
    finally:
        graph_passes.config.joint_custom_pre_pass = before
    assert len(graphs) == 1


@pytest.mark.thorough
@pytest.mark.usefixtures("no_machine_code")
def test_a_last_pass_sees_forward_and_backward() -> None:
    from meshwright.torch_private import graph_passes

    class Seen(graph_passes.CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            graphs.append(graph)

        def uuid(self) -> None:
            return None

    graphs: list[torch.fx.Graph] = []
    graph_passes.set_last_pass(Seen())
    try:
        x = torch.ones(3, requires_grad=True)
        torch.compile(lambda value: (value * 3).sum())(x).backward()
    finally:
        graph_passes.set_last_pass(None)
    assert len(graphs) == 2
    assert graph_passes.get_hash_for_files((__file__,)) == graph_passes.get_hash_for_files((__file__,))


def _symmetric() -> bool:
    from meshwright.torch_private import symmetric_memory

    group = dist.distributed_c10d._get_default_group()
    symmetric_memory.use_symmetric_memory(group)
    return symmetric_memory.symmetric.is_symm_mem_enabled_for_group(group.group_name)


def test_groups_whose_messages_are_fused_are_named() -> None:
    # torch 2.15 needs no names: it asks whether there is a GPU.
    assert run_ranks(_symmetric, 1) == [torch.__version__ < "2.15" or torch.accelerator.is_available()]


def test_a_dead_worker_is_asked_after_and_works_end() -> None:
    handler = signal.getsignal(signal.SIGCHLD)
    processes.raise_if_a_worker_failed()  # there is none
    assert signal.getsignal(signal.SIGCHLD) is handler
    assert processes.finished_work([torch.ones(1)]).wait()


def test_groups_are_made_as_torch_makes_them() -> None:
    store = dist.HashStore()
    group = processes.gloo_group(store, 0, 1, timedelta(seconds=10))
    tensor = torch.ones(2)
    group.allreduce([tensor]).wait()
    assert tensor.tolist() == [1.0, 1.0]
    made: list[Any] = []
    before = processes.c10d._new_process_group_helper
    try:
        processes.replace_group_maker(lambda make: lambda *args, **rest: (made.append(args), make(*args, **rest))[1])
        assert processes.c10d._new_process_group_helper is not before
    finally:
        processes.c10d._new_process_group_helper = before
    calls = {name: getattr(dist, name) for name in ("broadcast_object_list", "scatter_object_list")}
    try:
        processes.replace_object_messages(made.append, made.append)
        dist.broadcast_object_list("seen")  # type: ignore[arg-type]
        assert processes.c10d.scatter_object_list is not calls["scatter_object_list"] and made[-1] == "seen"
    finally:
        processes.replace_object_messages(*calls.values())
    processes.remember_group(group, "gloo", store)
    assert processes.c10d._world.pg_map.pop(group)[1] is store
    processes.c10d._world.pg_names[group] = "ours"
    assert processes.name_of_group(group) == "ours"
    del processes.c10d._world.pg_names[group]


def test_events_of_a_gpu_are_told_apart() -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        torch.ones(2) + 1
    assert not any(processes.is_cuda_event(event) for event in profiled.key_averages())


class _Product(torch.autograd.Function):
    """A matrix product with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x @ y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return grads[0] @ y.T, x.T @ grads[0]


def _hits_and_misses(traced: str, reuse: bool) -> tuple[int, int]:
    """Of the compiler's cache when it compiles a product, after `start_compiler`."""
    compiler.start_compiler(traced, reuse)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    x, y = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    torch.compile(lambda x, y: _Product.apply(x, y))(x, y).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, y.detach().sum(1).expand(3, 4))
    counted = torch._dynamo.utils.counters["aot_autograd"]
    return counted["autograd_cache_hit"], counted["autograd_cache_miss"]


@pytest.mark.thorough
def test_graphs_with_autograd_functions_are_traced_once_for_the_same_code_settings_and_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    code = compiler._code
    with torch.compiler.config.patch(cache_key_tag="a user's"):
        assert _hits_and_misses("tp 0", reuse=True) == (0, 1)
        assert _hits_and_misses("tp 0", reuse=True) == (1, 0)
        assert _hits_and_misses("tp 1", reuse=True) == (0, 1)
        assert _hits_and_misses("tp 0", reuse=False) == (0, 0)
        with monkeypatch.context() as changed:
            changed.setattr(compiler, "_code", lambda: code() + "x = 1")
            assert _hits_and_misses("tp 0", reuse=True) == (0, 1)
        with monkeypatch.context() as changed:
            changed.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: "another kernel")
            assert _hits_and_misses("tp 0", reuse=True) == (0, 1)
        tag = torch.compiler.config.cache_key_tag
        assert tag.startswith("a user's|") and "tp 1" not in tag
    torch._dynamo.reset()
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = False
