"""Advantages, KL, whitening and losses against brute-force loops and closed forms.

``trap N`` in a test's docstring is a known way in which RLHF code goes wrong (reference formulas, part E).
"""

import dataclasses
import math
import time

import numpy as np
import pytest
import torch

from hybridflow.algorithms.advantages import ADVANTAGE_ESTIMATORS, compute
from hybridflow.algorithms.gae import gae
from hybridflow.algorithms.kl import AdaptiveKL, FixedKL, kl_estimate, make_kl_controller
from hybridflow.algorithms.losses import POLICY_LOSSES, policy_loss, supervised_loss, value_loss
from hybridflow.algorithms.registry import Registry
from hybridflow.algorithms.whitening import whiten
from hybridflow.batch.batch import Batch, Ragged
from hybridflow.config.schema import AlgorithmConfig, KLControlConfig
from hybridflow.errors import ConfigError, NumericsError
from hybridflow.telemetry.metrics import merge
from hybridflow.telemetry.metrics import values as values_of
from hybridflow.telemetry.names import check_names

LENGTHS = [3, 0, 7, 1, 12, 5]


def config(**changes) -> AlgorithmConfig:
    return dataclasses.replace(AlgorithmConfig(), **changes)


def ragged(rng, lengths=LENGTHS) -> Ragged:
    return Ragged.from_lengths(rng.normal(size=sum(lengths)).astype(np.float32), np.asarray(lengths))


def step_batch(rng, lengths=LENGTHS, **columns) -> Batch:
    """A whole step of random numbers; ``columns`` replaces some."""
    count = len(lengths)
    made = {
        "response_tokens": Ragged.from_lengths(rng.integers(0, 9, sum(lengths)).astype(np.int32), np.asarray(lengths)),
        "log_probs": ragged(rng, lengths),
        "reference_log_probs": ragged(rng, lengths),
        "values": ragged(rng, lengths),
        "reward": rng.normal(size=count).astype(np.float32),
    }
    return Batch.of(np.arange(count) + 100, **{**made, **columns})


def brute_gae(rewards, values, gamma, lam):
    """One response, token by token, by the definition: a discounted sum of all later deltas."""
    length = len(rewards)
    delta = [rewards[t] + gamma * (values[t + 1] if t + 1 < length else 0.0) - values[t] for t in range(length)]
    return [sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, length)) for t in range(length)]


class TestGae:
    @pytest.mark.parametrize("gamma,lam", [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (1.0, 0.5)])
    def test_equals_brute_force_on_ragged_rows(self, gamma, lam):
        rng = np.random.default_rng(0)
        rewards, values = ragged(rng), ragged(rng)
        advantages, returns = gae(rewards, values, gamma, lam)
        for row in range(len(rewards)):
            expected = brute_gae(rewards[row].astype(float), values[row].astype(float), gamma, lam)
            np.testing.assert_allclose(advantages[row], expected, atol=1e-5)
            np.testing.assert_allclose(returns[row], np.asarray(expected) + values[row], atol=1e-5)
        assert advantages.values.dtype == returns.values.dtype == np.float32

    def test_closed_form_at_gamma_and_lambda_one(self):
        """Trap 7: A_t is the sum of the rewards still to come, minus V_t; returns are that sum."""
        rng = np.random.default_rng(1)
        rewards, values = ragged(rng), ragged(rng)
        advantages, returns = gae(rewards, values, 1.0, 1.0)
        for row in range(len(rewards)):
            to_come = np.cumsum(rewards[row][::-1])[::-1]
            np.testing.assert_allclose(returns[row], to_come, atol=1e-5)
            np.testing.assert_allclose(advantages[row], to_come - values[row], atol=1e-5)

    def test_values_are_of_the_state_before_the_token(self):
        """Trap 1: with the exact value function of the states before each token, nothing is left to learn; with one
        shifted by a token (the state after it) something is."""
        gamma, length, score = 0.9, 6, 2.0
        rewards = Ragged.of([[0.0] * (length - 1) + [score]], "float32")
        before = Ragged.of([[score * gamma ** (length - 1 - t) for t in range(length)]], "float32")
        after = Ragged.of([[*before[0][1:], 0.0]], "float32")
        assert np.abs(gae(rewards, before, gamma, 0.95)[0].values).max() < 1e-6
        assert np.abs(gae(rewards, after, gamma, 0.95)[0].values).max() > 0.1

    def test_rows_do_not_leak_into_each_other(self):
        """A row alone gives the same as the row among others, whatever the order."""
        rng = np.random.default_rng(2)
        rewards, values = ragged(rng), ragged(rng)
        together = gae(rewards, values, 0.97, 0.9)[0]
        order = np.array([4, 2, 0, 5, 1, 3])
        shuffled = gae(rewards.select(order), values.select(order), 0.97, 0.9)[0]
        for new, old in enumerate(order):
            np.testing.assert_array_equal(shuffled[new], together[old])

    def test_empty(self):
        empty = Ragged.of([], "float32")
        assert len(gae(empty, empty, 1.0, 1.0)[0].values) == 0
        hollow = Ragged.of([[], []], "float32")
        assert len(gae(hollow, hollow, 1.0, 1.0)[0]) == 2

    def test_rows_of_different_lengths_are_refused(self):
        with pytest.raises(ValueError, match="different tokens"):
            gae(Ragged.of([[1.0]], "float32"), Ragged.of([[1.0, 2.0]], "float32"), 1.0, 1.0)

    def test_a_demo_step_takes_about_a_millisecond(self):
        rng = np.random.default_rng(3)
        rewards, values = ragged(rng, [8] * 256), ragged(rng, [8] * 256)
        gae(rewards, values, 1.0, 0.95)
        times = []
        for _ in range(20):
            start = time.perf_counter()
            gae(rewards, values, 1.0, 0.95)
            times.append(time.perf_counter() - start)
        assert min(times) < 5e-3  # 0.3 ms on an idle core


class TestKL:
    def test_estimators_against_the_exact_divergence(self):
        """Trap 5: over tokens drawn from the policy, k1 and k3 average to KL(policy || reference), not to its reverse;
        k1 goes below 0, k2 and k3 never do."""
        rng = np.random.default_rng(0)
        policy, reference = rng.dirichlet(np.full(8, 2.0)), rng.dirichlet(np.full(8, 3.0))
        x = np.log(policy), np.log(reference)
        exact = float((policy * (x[0] - x[1])).sum())
        reverse = float((reference * (x[1] - x[0])).sum())
        assert abs(exact - reverse) > 0.05
        for kind in ("k1", "k3"):
            mean = float((policy * kl_estimate(*x, kind)).sum())
            assert mean == pytest.approx(exact, abs=1e-5), kind
            swapped = float((policy * kl_estimate(x[1], x[0], kind)).sum())
            assert swapped != pytest.approx(exact, abs=1e-2), kind
        assert kl_estimate(*x, "k1").min() < 0
        assert min(kl_estimate(*x, "k2").min(), kl_estimate(*x, "k3").min(), kl_estimate(*x, "abs").min()) >= 0

    def test_values_by_hand(self):
        new, old = np.array([-1.0, -2.0, -3.0]), np.array([-2.0, -1.0, -3.0])
        np.testing.assert_allclose(kl_estimate(new, old, "k1"), [1, -1, 0])
        np.testing.assert_allclose(kl_estimate(new, old, "abs"), [1, 1, 0])
        np.testing.assert_allclose(kl_estimate(new, old, "k2"), [0.5, 0.5, 0])
        np.testing.assert_allclose(kl_estimate(new, old, "k3"), [math.exp(-1), math.e - 2, 0], rtol=1e-6)

    @pytest.mark.parametrize("alias,name", [("kl", "k1"), ("mse", "k2"), ("low_var_kl", "k3")])
    def test_names_of_other_projects(self, alias, name):
        new, old = np.array([-1.0, -2.5]), np.array([-2.0, -1.0])
        np.testing.assert_array_equal(kl_estimate(new, old, alias), kl_estimate(new, old, name))

    def test_no_overflow(self):
        """Trap 5: exp(-x) of a token that the policy has all but unlearnt stays finite."""
        estimate = kl_estimate(np.array([-1e4, -1.0]), np.array([-1.0, -1e4]), "k3")
        assert np.isfinite(estimate).all() and estimate.max() <= 10

    def test_unknown_name(self):
        with pytest.raises(ConfigError, match="k9"):
            kl_estimate(np.zeros(1), np.zeros(1), "k9")

    def test_adaptive_controller(self):
        """Trap 20: the error is clipped to +-0.2, the coefficient moves by error * samples / horizon."""
        controller = AdaptiveKL(coef=0.1, target=0.05, horizon=1000)
        controller.update(0.055, 100)
        assert controller.coef == pytest.approx(0.1 * (1 + 0.1 * 0.1))
        before = controller.coef
        controller.update(5.0, 100)
        assert controller.coef == pytest.approx(before * (1 + 0.2 * 0.1))
        before = controller.coef
        controller.update(-1.0, 100)
        assert controller.coef == pytest.approx(before * (1 - 0.2 * 0.1))

    def test_a_broken_kl_does_not_reach_the_coefficient(self):
        controller = AdaptiveKL(0.1, 0.05, 1000)
        with pytest.raises(NumericsError, match="nan"):
            controller.update(math.nan, 10)
        assert controller.coef == 0.1

    def test_adaptive_controller_resumes(self):
        """Trap 20: the coefficient is state, and belongs into the checkpoint."""
        first = AdaptiveKL(0.1, 0.05, 1000)
        first.update(1.0, 500)
        second = AdaptiveKL(0.1, 0.05, 1000)
        second.load_state_dict(first.state_dict())
        first.update(0.0, 64)
        second.update(0.0, 64)
        assert first == second

    def test_fixed_controller(self):
        controller = FixedKL(0.1)
        controller.update(100.0, 100)
        controller.load_state_dict({"coef": 5.0})
        assert controller.coef == 0.1 and controller.state_dict() == {"coef": 0.1}

    def test_made_from_the_config(self):
        assert make_kl_controller(KLControlConfig(type="fixed", kl_coef=0.2)) == FixedKL(0.2)
        adaptive = make_kl_controller(KLControlConfig(type="adaptive", kl_coef=0.2, target_kl=0.3, horizon=40))
        assert adaptive == AdaptiveKL(0.2, 0.3, 40)


class TestWhitening:
    def test_unbiased_over_all_values(self):
        """Trap 8: mean 0 and variance 1 with Bessel's n - 1; torch's std is the witness."""
        values = np.random.default_rng(0).normal(3, 5, 100).astype(np.float32)
        wanted = (torch.tensor(values) - torch.tensor(values).mean()) / torch.tensor(values).std()
        np.testing.assert_allclose(whiten(values), wanted.numpy(), atol=1e-5)

    @pytest.mark.parametrize("values", [[], [4.0], [2.5] * 7])
    def test_equal_values_become_zero(self, values):
        """Trap 8: zeros, not NaN."""
        np.testing.assert_array_equal(whiten(np.asarray(values, np.float32)), np.zeros(len(values)))


class TestAdvantages:
    def test_equals_brute_force(self):
        rng = np.random.default_rng(0)
        batch = step_batch(rng)
        algorithm = config(gamma=0.99, lam=0.95, kl_penalty="k1", whiten_advantages=False)
        result, metrics = compute(batch, algorithm, kl_coef=0.3)
        columns, totals = {n: batch.ragged(n) for n in ("log_probs", "reference_log_probs", "values")}, []
        for row, length in enumerate(LENGTHS):
            rewards = -0.3 * (columns["log_probs"][row] - columns["reference_log_probs"][row])
            if length:
                rewards[-1] += batch.scalar("reward")[row]
            totals.append(sum(rewards))
            expected = brute_gae(rewards, columns["values"][row].astype(float), 0.99, 0.95)
            np.testing.assert_allclose(result.ragged("advantages")[row], expected, atol=1e-5)
            np.testing.assert_allclose(result.ragged("returns")[row], expected + columns["values"][row], atol=1e-5)
        kl = columns["log_probs"].values - columns["reference_log_probs"].values
        assert metrics["kl/actor_reference"].value == pytest.approx(kl.mean(), abs=1e-6)
        assert metrics["reward/mean"].value == pytest.approx(batch.scalar("reward").mean(), abs=1e-6)
        assert metrics["kl/coefficient"].value == 0.3
        assert metrics["reward/with_kl_mean"].value == pytest.approx(np.mean(totals), abs=1e-5)
        assert result.sample_ids.tolist() == batch.sample_ids.tolist()

    def test_returns_come_before_whitening(self):
        """Traps 7 and 8: whitening changes the advantages only, and works over all tokens of the step."""
        batch = step_batch(np.random.default_rng(1))
        plain, _ = compute(batch, config(whiten_advantages=False), 0.1)
        white, _ = compute(batch, config(whiten_advantages=True), 0.1)
        np.testing.assert_array_equal(plain.ragged("returns").values, white.ragged("returns").values)
        np.testing.assert_array_equal(whiten(plain.ragged("advantages").values), white.ragged("advantages").values)
        assert white.ragged("advantages").values.std(ddof=1) == pytest.approx(1, abs=1e-4)

    def test_the_score_lies_on_the_last_token_whatever_its_id(self):
        """Trap 14: lengths decide, ids never do: pad = eos inside a response, or a truncated one, changes nothing."""
        rng = np.random.default_rng(2)
        columns = {"log_probs": ragged(rng), "reference_log_probs": ragged(rng), "values": ragged(rng)}
        results = []
        for token in (0, 2, 7):
            tokens = Ragged.from_lengths(np.full(sum(LENGTHS), token, np.int32), np.asarray(LENGTHS))
            batch = step_batch(np.random.default_rng(3), response_tokens=tokens, **columns)
            results.append(compute(batch, config(gamma=1.0, lam=1.0, whiten_advantages=False), 0.0)[0])
        for result in results[1:]:
            np.testing.assert_array_equal(result.ragged("returns").values, results[0].ragged("returns").values)
        scores = batch.scalar("reward")
        for row, length in enumerate(LENGTHS):
            np.testing.assert_allclose(results[0].ragged("returns")[row], [scores[row]] * length, atol=1e-6)

    def test_failed_rewards_are_refused_by_id(self):
        rng = np.random.default_rng(4)
        reward = np.array([1, np.nan, 0, np.inf, 1, 0], np.float32)
        with pytest.raises(NumericsError, match=r"2 samples.*101, 103"):
            compute(step_batch(rng, reward=reward), config(), 0.1)

    def test_broken_log_probs_are_refused_by_id(self):
        batch = step_batch(np.random.default_rng(5))
        values = batch.ragged("log_probs").values.copy()
        values[4] = np.nan  # in row 2: rows 0 and 1 hold 3 and 0 tokens
        with pytest.raises(NumericsError, match="102"):
            compute(batch.with_columns(log_probs=Ragged(values, batch.ragged("log_probs").offsets)), config(), 0.1)

    def test_reference_is_needed_only_for_a_penalty(self):
        rng = np.random.default_rng(6)
        full = step_batch(rng)
        batch = full.select(np.arange(6), ["response_tokens", "log_probs", "values", "reward"])
        _, metrics = compute(batch, config(), 0.0)
        assert "kl/actor_reference" not in metrics
        with pytest.raises(KeyError, match="reference_log_probs"):
            compute(batch, config(), 0.1)

    def test_mismatch_of_rollout_and_trainer(self):
        rng = np.random.default_rng(7)
        batch = step_batch(rng)
        log_probs = batch.ragged("log_probs")
        shifted = Ragged(log_probs.values + np.float32(0.25), log_probs.offsets)
        _, metrics = compute(batch.with_columns(rollout_log_probs=shifted), config(), 0.1)
        assert metrics["mismatch/abs_log_prob"].value == pytest.approx(0.25, abs=1e-6)
        k3 = np.exp(-0.25) - 1 + 0.25  # of the rollout's policy from the trainer's
        assert metrics["mismatch/kl"].value == pytest.approx(k3, abs=1e-6)
        assert "mismatch/abs_log_prob" not in compute(batch, config(), 0.1)[1]

    def test_a_batch_of_nothing(self):
        empty = step_batch(np.random.default_rng(8), lengths=[])
        result, metrics = compute(empty, config(), 0.1)
        assert len(result) == 0 and "reward/mean" not in metrics

    def test_a_perfect_critic_explains_everything(self):
        batch = step_batch(np.random.default_rng(9))
        algorithm = config(gamma=1.0, lam=1.0)
        returns = compute(batch, algorithm, 0.0)[0].ragged("returns")
        _, metrics = compute(batch.with_columns(values=returns), algorithm, 0.0)
        assert metrics["values/explained_variance"].value == pytest.approx(1.0, abs=1e-6)

    def test_metric_names_are_in_the_table(self):
        rng = np.random.default_rng(10)
        batch = step_batch(rng, rollout_log_probs=ragged(rng))
        check_names(compute(batch, config(), 0.1)[1])

    def test_estimators_have_names(self):
        assert list(ADVANTAGE_ESTIMATORS) == ["gae"]
        with pytest.raises(ConfigError, match="did you mean 'gae'"):
            compute(step_batch(np.random.default_rng(0)), config(adv_estimator="gea"), 0.1)


def tensors(rng, count, *names):
    return {name: torch.tensor(rng.normal(size=count), dtype=torch.float64) for name in names}


def brute_policy_loss(new, old, advantage, low, high, dual_clip):
    ratio = math.exp(max(-20.0, min(20.0, new - old)))
    loss = max(-advantage * ratio, -advantage * max(1 - low, min(1 + high, ratio)))
    return min(loss, -advantage * dual_clip) if dual_clip is not None and advantage < 0 else loss


class TestPolicyLoss:
    @pytest.mark.parametrize("high", [None, 0.28])
    @pytest.mark.parametrize("dual_clip", [None, 3.0, 1.5])
    def test_equals_brute_force(self, high, dual_clip):
        rng = np.random.default_rng(0)
        outputs, columns = tensors(rng, 400, "log_probs", "entropy"), tensors(rng, 400, "log_probs", "advantages")
        algorithm = config(clip_ratio=0.2, clip_ratio_high=high, dual_clip=dual_clip, entropy_coef=0.01)
        total, metrics = policy_loss(outputs, columns, algorithm)
        tokens = torch.stack([outputs["log_probs"], columns["log_probs"], columns["advantages"]], dim=1).tolist()
        losses = [brute_policy_loss(*token, 0.2, high or 0.2, dual_clip) for token in tokens]
        assert total.item() == pytest.approx(sum(losses) - 0.01 * outputs["entropy"].sum().item())
        assert metrics["loss/policy"].value == pytest.approx(total.item() / 400)
        assert metrics["entropy/mean"].value == pytest.approx(outputs["entropy"].mean().item())

    def test_on_policy_the_ratio_is_one(self):
        """Trap 10: nothing is clipped, KL is 0, and the gradient is that of -A log p."""
        rng = np.random.default_rng(1)
        columns = tensors(rng, 50, "log_probs", "advantages")
        outputs = {"log_probs": columns["log_probs"].clone().requires_grad_(), "entropy": torch.ones(50)}
        total, metrics = policy_loss(outputs, columns, config())
        total.backward()
        assert metrics["policy/ratio_max"].value == 1.0
        assert metrics["policy/clip_fraction"].value == metrics["policy/approx_kl"].value == 0.0
        torch.testing.assert_close(outputs["log_probs"].grad, -columns["advantages"])

    def test_clipping_stops_the_gradient_on_one_side_only(self):
        """Trap 10: a good token beyond 1 + high and a bad one below 1 - low are left alone, the other two are not."""
        ratio = torch.tensor([1.5, 0.5, 1.5, 0.5], dtype=torch.float64)
        advantages = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
        new = ratio.log().requires_grad_()
        outputs, columns = (
            {"log_probs": new, "entropy": torch.zeros(4)},
            {"log_probs": torch.zeros(4, dtype=torch.float64), "advantages": advantages},
        )
        total, metrics = policy_loss(outputs, columns, config(clip_ratio=0.2, clip_ratio_high=0.28, dual_clip=None))
        total.backward()
        torch.testing.assert_close(new.grad, torch.tensor([0.0, -0.5, 1.5, 0.0], dtype=torch.float64))
        assert metrics["policy/clip_fraction"].value == 0.5
        assert total.item() == pytest.approx(-1.28 - 0.5 + 1.5 + 0.8)

    def test_dual_clip_bounds_bad_tokens_only(self):
        """Trap 10: for A < 0 the loss never exceeds -A c; for A > 0 the bound does nothing."""
        new = torch.tensor([3.0, -3.0], dtype=torch.float64, requires_grad=True)
        outputs = {"log_probs": new, "entropy": torch.zeros(2)}
        columns = {"log_probs": torch.zeros(2, dtype=torch.float64), "advantages": torch.tensor([-2.0, 2.0]).double()}
        total, metrics = policy_loss(outputs, columns, config(dual_clip=3.0))
        total.backward()
        assert total.item() == pytest.approx(6.0 - 2.0 * math.exp(-3))
        assert new.grad[0] == 0 and new.grad[1] != 0
        assert metrics["policy/dual_clip_fraction"].value == 0.5

    def test_no_overflow(self):
        """Trap 10: the log-ratio is clamped before exp."""
        outputs = {"log_probs": torch.tensor([0.0, -500.0], requires_grad=True), "entropy": torch.zeros(2)}
        columns = {"log_probs": torch.tensor([-500.0, 0.0]), "advantages": torch.tensor([-1.0, 1.0])}
        total, metrics = policy_loss(outputs, columns, config(dual_clip=None))
        total.backward()
        assert torch.isfinite(total) and torch.isfinite(outputs["log_probs"].grad).all()
        assert metrics["policy/ratio_max"].value == pytest.approx(math.exp(20), rel=1e-5)

    def test_gradient_and_metrics_do_not_depend_on_the_cuts(self):
        """Trap 6: sums over micro-batches, divided once by the global count; the metrics are weighted the same way."""
        rng = np.random.default_rng(2)
        values, columns = tensors(rng, 60, "log_probs", "entropy"), tensors(rng, 60, "log_probs", "advantages")
        algorithm = config(entropy_coef=0.02)

        def run(cuts):
            outputs = {name: value.clone().requires_grad_() for name, value in values.items()}
            reports = []
            for start, stop in zip([0, *cuts], [*cuts, 60], strict=True):
                part = {name: value[start:stop] for name, value in outputs.items()}
                total, metrics = policy_loss(part, {n: c[start:stop] for n, c in columns.items()}, algorithm)
                (total / 60).backward()
                reports.append(metrics)
            return [value.grad for value in outputs.values()], merge(reports)

        whole, whole_metrics = run([])
        for cuts in ([30], [1, 2, 50], [7, 7, 20], list(range(1, 60))):  # [7, 7]: a rank without a token
            gradients, metrics = run(cuts)
            for gradient, wanted in zip(gradients, whole, strict=True):
                torch.testing.assert_close(gradient, wanted, atol=1e-12, rtol=0)
            assert values_of(metrics) == pytest.approx(values_of(whole_metrics))

    def test_it_is_registered(self):
        assert POLICY_LOSSES["ppo"] is policy_loss


class TestOtherLosses:
    @pytest.mark.parametrize("clip", [None, 0.2])
    def test_value_loss_equals_brute_force(self, clip):
        rng = np.random.default_rng(0)
        outputs, columns = tensors(rng, 200, "values"), tensors(rng, 200, "values", "returns")
        total, metrics = value_loss(outputs, columns, config(value_clip=clip))
        expected = []
        for new, old, target in zip(
            outputs["values"].tolist(), columns["values"].tolist(), columns["returns"].tolist(), strict=True
        ):
            near = new if clip is None else max(old - clip, min(old + clip, new))
            expected.append(0.5 * max((new - target) ** 2, (near - target) ** 2))
        assert total.item() == pytest.approx(sum(expected))
        assert metrics["loss/value"].value == pytest.approx(sum(expected) / 200)
        assert (metrics["value/clip_fraction"].value > 0) == (clip is not None)

    def test_value_loss_is_invariant_to_cuts(self):
        """Trap 6: the value loss has the same global normaliser as the policy's."""
        rng = np.random.default_rng(1)
        outputs, columns = tensors(rng, 40, "values"), tensors(rng, 40, "values", "returns")
        whole = value_loss(outputs, columns, config())[0]
        parts = [
            value_loss({"values": outputs["values"][s]}, {n: c[s] for n, c in columns.items()}, config())[0]
            for s in (slice(0, 3), slice(3, 29), slice(29, 40))
        ]
        torch.testing.assert_close(sum(parts), whole)

    def test_supervised_loss_is_cross_entropy(self):
        logits = torch.randn(9, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        tokens = torch.arange(9) % 5
        log_probs = logits.log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
        total, metrics = supervised_loss({"log_probs": log_probs}, {})
        wanted = torch.nn.functional.cross_entropy(logits, tokens, reduction="sum")
        assert total.item() == pytest.approx(wanted.item())
        assert metrics["loss/supervised"].value == pytest.approx(wanted.item() / 9)


def test_names_of_loss_metrics_are_in_the_table():
    rng = np.random.default_rng(0)
    outputs, columns = (
        tensors(rng, 4, "log_probs", "entropy", "values"),
        tensors(rng, 4, "log_probs", "advantages", "values", "returns"),
    )
    check_names(policy_loss(outputs, columns, config())[1])
    check_names(value_loss(outputs, columns, config())[1])
    check_names(supervised_loss(outputs, columns)[1])


def test_a_name_is_registered_once():
    registry: Registry = Registry("thing", "some.key")
    registry.register("one")(len)
    registry.register("one")(len)  # the same again: a module imported twice
    with pytest.raises(ValueError, match="already registered"):
        registry.register("one")(sum)
    with pytest.raises(ConfigError, match=r"some\.key"):
        registry["two"]
