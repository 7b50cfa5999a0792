"""The mesh engine beside parity: skipped steps, evaluation, batches, refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import families
import mesh_ranks as ranks
from fp64 import Fp32MeansFp64
from megatrain.engine.mesh import launch
from megatrain.engine.mesh.data_parallel import Devices
from megatrain.engine.mesh.engine import MeshEngine
from megatrain.engine.mesh.layout import Layout, MeshPlan
from megatrain.engine.mesh.pipeline import KEPT_SHAPES
from megatrain.errors import EngineClosed, UserError
from megatrain.optim.adamw import AdamW
from megatrain.optim.spec import ParamGroup
from mesh_cases import Case
from mesh_parity import batches, build, digests
from reference import ReferenceTrainer

LLAMA = Case("llama", Layout(), 4, tied=True, kind="plain")


def engine(model, layout, optim=None, **plan):
    """In fp64, unless `plan` says otherwise."""
    optim = optim or AdamW(learning_rate=1e-2, max_grad_norm=0.1)
    plan = MeshPlan(layout, **{"compute_dtype": "fp64", **plan})
    return MeshEngine(model, plan, optim=optim, debug=Fp32MeansFp64 if plan.compute_dtype == "fp64" else None)


def test_one_nan_on_one_rank_makes_all_ranks_skip():
    """A skipped step changes no state on any rank."""
    model, steps = build(LLAMA), batches(LLAMA)

    def work():
        trained = engine(model, Layout(tensor=2, pipeline=2))
        trained.train_step(steps[0])
        before = digests(trained)
        finish = trained.gradients.finish

        def poisoned(loss):
            if torch.distributed.get_rank() == 3:
                split = next(p for _, p, box, _ in trained.gradients.all() if box.tensor_dim is not None)
                split.grad.to_local().fill_(float("nan"))
            return finish(loss)

        trained.gradients.finish = poisoned
        skipped = trained.train_step(steps[1])
        trained.gradients.finish = finish
        unchanged = digests(trained) == before and trained.updates == 1 and trained.step == 2
        return skipped.skipped, unchanged, trained.train_step(steps[2]).loss

    results = ranks.run(4, work)
    assert {r[0] for r in results} == {"gradient norm is not finite"}
    assert all(r[1] for r in results) and len({r[2] for r in results}) == 1


def test_evaluation_changes_nothing():
    """Training with evaluations in between is training without, bit for bit."""
    model, steps = build(LLAMA), batches(LLAMA)

    def work(evaluate):
        trained = engine(model, Layout(pipeline=2, shard=2, schedule="zb1p"))
        for batch in steps:
            trained.train_step(batch)
            if evaluate:
                trained.eval_step(steps[0])
        return digests(trained)

    assert ranks.run(4, work, False) == ranks.run(4, work, True)


@pytest.mark.parametrize("layout", [Layout(shard=2), Layout(pipeline=2, shard=1)], ids=["shard", "pipeline"])
def test_weights_loaded_after_an_evaluation_take_effect(layout, tmp_path):
    """Weights gathered for an evaluation are not reused by the next step or evaluation."""
    model, steps = families.build(families.BY_NAME["llama"], seed=1, dtype=torch.float32), batches(LLAMA)

    def work():
        trained = engine(model, layout, compute_dtype="fp32")
        trained.save(tmp_path / "saved")
        before = trained.eval_step(steps[0]).loss_sum
        trained.train_step(steps[0], 1e-1)
        between = trained.eval_step(steps[0]).loss_sum
        trained.load(tmp_path / "saved")
        return before, between, trained.eval_step(steps[0]).loss_sum

    before, between, after = ranks.run(2, work)[0]
    assert before == after != between


@pytest.mark.parametrize(
    ("schedule", "virtual"), [("zb1p", 1), ("zbv", 2), pytest.param("dualpipev", 2, marks=pytest.mark.slow)]
)
def test_split_backwards_accumulate_in_fp32(schedule, virtual):
    """With bf16 compute the gradients are, bit for bit, those of 1F1B, which FSDP's own hooks accumulate."""
    family = families.BY_NAME["llama"]
    model = families.build(family, seed=1, dtype=torch.float32, tie=False)
    batch = families.batch(family, seed=0, rows=8, tokens=16, kind="plain")

    def work(layout):
        trained = MeshEngine(model, MeshPlan(layout, compute_dtype="bf16"))
        trained.backward(batch)
        return dict(trained.named_gradients())

    pieces = {"pipeline": 2, "shard": 1, "microbatches": 8}
    want = ranks.run(2, work, Layout(**pieces))[0]
    found = ranks.run(2, work, Layout(**pieces, schedule=schedule, virtual=virtual))[0]
    assert [name for name in want if not torch.equal(found[name], want[name])] == []


@pytest.mark.parametrize(("schedule", "pipeline"), [("interleaved", 2), ("zbv", 2), ("interleaved", 3)])
def test_both_ends_issue_the_messages_of_an_evaluation_in_the_same_order(schedule, pipeline, monkeypatch):
    """NCCL deadlocks otherwise, gloo does not. See [Note: order of messages] in pipeline.py."""
    case = replace(LLAMA, layers=6)
    model, steps = build(case), batches(case)
    named: list[tuple[str, int]] = []

    def noting(word, plain):
        def call(tensor, peer, group):
            named.append((word, peer))
            return plain(tensor, peer, group=group)

        return call

    def work():
        layout = Layout(pipeline=pipeline, virtual=2, shard=1, schedule=schedule, microbatches=2 * pipeline)
        trained = engine(model, layout)
        for word in ("send", "recv"):
            monkeypatch.setattr(torch.distributed, f"i{word}", noting(word, getattr(torch.distributed, f"i{word}")))
            monkeypatch.delattr(torch.distributed, word)
        loss = trained.eval_step(steps[0]).loss_sum
        return named, loss

    results = ranks.run(pipeline, work)
    other = {"send": "recv", "recv": "send"}
    for rank, (mine, _) in enumerate(results):
        for peer, (theirs, _) in enumerate(results):
            here = [word for word, p in mine if p == peer]
            there = [other[word] for word, p in theirs if p == rank]
            assert here == there, (rank, peer)
    assert sum(len(mine) for mine, _ in results) >= 4 * pipeline


def test_every_group_has_the_timeout_of_the_default_group(monkeypatch):
    """Otherwise NCCL's default of ten minutes would end the process before the watchdog writes stacks."""
    monkeypatch.setattr(launch, "_timeout_s", 77.0)

    def work():
        devices = Devices.build(Layout(pipeline=2, context=2, shard=1), torch.device("cpu"))
        groups = [devices.mesh[name].get_group() for name in devices.mesh.mesh_dim_names or ()]
        groups += [devices.context_group, devices.tie_group]
        found = [g._get_backend(torch.device("cpu")).options._timeout for g in groups if g is not None]
        return [limit.total_seconds() for limit in found]

    for found in ranks.run(4, work):
        assert set(found) == {77.0} and len(found) == 6


def test_shapes_may_change_from_step_to_step():
    """Shorter rows after longer ones, more rows, fewer rows than ranks: each shape is computed correctly.

    Receive buffers of only the latest shapes are kept.
    """
    model = build(LLAMA)
    family = families.BY_NAME["llama"]
    shapes = [(8, 16), (3, 9), (1, 8), (8, 16), (5, 24), (2, 11)]
    steps = [families.batch(family, seed=i, rows=r, tokens=t, kind="plain") for i, (r, t) in enumerate(shapes)]

    def work():
        trained = engine(model, Layout(pipeline=2, shard=2))
        results = [(r.loss, r.grad_norm) for r in (trained.train_step(batch) for batch in steps)]
        assert trained.counters()["schedules"] == KEPT_SHAPES < len(set(shapes))
        return results

    found = ranks.run(4, work)[0]
    with Fp32MeansFp64():
        trainer = ReferenceTrainer(model, learning_rate=1e-2, max_grad_norm=0.1)
        want = [trainer.step(batch) for batch in steps]
    assert torch.allclose(torch.tensor(found), torch.tensor(want), rtol=1e-11, atol=0)


def test_a_step_without_targets_changes_nothing():
    model, steps = build(LLAMA), batches(LLAMA)
    empty = {**steps[0], "labels": torch.full_like(steps[0]["labels"], -100)}

    def work():
        trained = engine(model, Layout(shard=2))
        before = digests(trained)
        result = trained.train_step(empty)
        return result.loss, result.tokens, digests(trained) == before, trained.eval_step(empty).tokens

    assert ranks.run(2, work)[0] == (None, 0, True, 0)


def test_padding_masks_are_dropped_and_others_refused():
    model = build(LLAMA)
    family = families.BY_NAME["llama"]
    masked = families.batch(family, seed=1, rows=4, tokens=16, kind="masked")
    holes = {**masked, "attention_mask": masked["attention_mask"].flip(1)}

    def work():
        trained = engine(model, Layout(context=2))
        with pytest.raises(UserError, match="masks tokens before real ones"):
            trained.train_step(holes)
        return trained.train_step(masked).loss

    loss = ranks.run(2, work)[0]
    with Fp32MeansFp64():
        want, _ = ReferenceTrainer(model).step(masked)
    assert loss == pytest.approx(want, rel=1e-12)


def test_parameter_groups_follow_the_owner_of_a_tie():
    model, steps = build(LLAMA), batches(LLAMA)
    optim = AdamW(learning_rate=1e-2, groups=(ParamGroup("embed_tokens", weight_decay=0.0, lr_scale=0.0),))

    def work():
        trained = engine(model, Layout(pipeline=2), optim=optim)
        trained.train_step(steps[0])
        return dict(trained.named_parameters())["model.embed_tokens.weight"], digests(trained)

    (weight, first), (_, last) = ranks.run(2, work)
    assert torch.equal(weight, model.model.embed_tokens.weight)
    assert [v for (n, *_), v in first.items() if "embed" in n] == [v for (n, *_), v in last.items() if "embed" in n]


def test_a_stage_may_be_frozen_altogether():
    model, steps = build(LLAMA), batches(LLAMA)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.2." in name or "layers.3." in name)
    optim = AdamW(learning_rate=1e-2, max_grad_norm=1.0)

    def work():
        trained = engine(model, Layout(pipeline=2), optim=optim)
        return [trained.train_step(batch).loss for batch in steps]

    losses = ranks.run(2, work)
    with Fp32MeansFp64():
        trainer = ReferenceTrainer(model, learning_rate=1e-2, max_grad_norm=1.0)
        want = [trainer.step(batch)[0] for batch in steps]
    assert losses == [pytest.approx(want, rel=1e-10)] * 2


def test_bf16_keeps_fp32_masters():
    """Updates far below bf16's resolution move the masters."""
    model = families.build(families.BY_NAME["llama"], seed=1, tie=True)
    steps = batches(LLAMA)

    def work():
        trained = engine(model, Layout(tensor=2, pipeline=2), compute_dtype="bf16", optim=AdamW(learning_rate=1e-6))
        losses = [trained.train_step(batch).loss for batch in steps]
        return losses, dict(trained.named_parameters())

    losses, weights = ranks.run(4, work)[0]
    plain = families.build(families.BY_NAME["llama"], seed=1, tie=True)
    trainer = ReferenceTrainer(plain, learning_rate=1e-6)
    want = [trainer.step(batch)[0] for batch in steps]
    assert losses == pytest.approx(want, rel=2e-2)
    before = dict(model.named_parameters())
    for name, weight in plain.named_parameters():
        moved, expected = weights[name] - before[name], weight - before[name]
        assert weights[name].dtype == torch.float32
        assert (moved != 0).float().mean() > 0.9, name
        # Shifting all keys alike changes no softmax, so the gradient of their bias is small, and half noise in bf16.
        least = 0.5 if name.endswith("k_proj.bias") else 0.95
        assert torch.nn.functional.cosine_similarity(moved.flatten(), expected.flatten(), dim=0) > least, name


def test_refusals_come_before_any_process_group():
    model = build(LLAMA)
    with pytest.raises(UserError, match="4 ranks, but there are 1 processes"):
        MeshEngine(model, MeshPlan(Layout(tensor=2, pipeline=2, shard=1)))


def test_a_bad_learning_rate_and_calls_after_close_are_refused():
    model, steps = build(LLAMA), batches(LLAMA)

    def work():
        with engine(model, Layout()) as trained:
            trained.train_step(steps[0])
            before = digests(trained)
            with pytest.raises(UserError, match="learning_rate = nan"):
                trained.train_step(steps[0], learning_rate=float("nan"))
            unchanged = digests(trained) == before and trained.step == 1
        with pytest.raises(EngineClosed):
            trained.train_step(steps[0])
        return unchanged

    assert ranks.run(1, work) == [True]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "recompute"),
    [
        (Layout(shard=2, microbatches=2), True),
        (Layout(pipeline=2, shard=1), False),
        (Layout(tensor=2, shard=1, microbatches=2), False),
        (Layout(tensor=2, shard=1), True),
    ],
)
def test_compiled_layers_compute_the_same(layout, recompute, monkeypatch):
    """Equal layers share one compiled function; FSDP and the pipeline stay outside of it."""
    model = families.build(families.BY_NAME["qwen3"], seed=1, tie=True)
    steps = batches(LLAMA)
    real, asked = torch.compile, []

    def without_a_compiler(function, **options):
        """All of torch.compile except code generation."""
        asked.append(function.__name__)
        return real(function, backend="aot_eager", **options)

    monkeypatch.setattr(torch, "compile", without_a_compiler)

    def work(compile):
        more = {"compute_dtype": "fp32", "compile": compile, "recompute": recompute}
        trained = engine(model, layout, **more)
        assert trained.compiled == (compile == "on")
        return [(r.loss, r.grad_norm) for r in (trained.train_step(batch) for batch in steps)], list(asked)

    compiled, eager = ranks.run(2, work, "on"), ranks.run(2, work, "off")
    for (got, names), (want, none) in zip(compiled, eager, strict=True):
        assert names.count("layer_0_keep") == 1 and none == []
        assert torch.allclose(torch.tensor(got), torch.tensor(want), rtol=1e-5)
