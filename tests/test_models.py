"""Models load from everywhere, agree with Hugging Face, and can be read, edited, differentiated."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny import BOS, CONTEXT, VOCAB, save_gpt2, save_gptj, save_neox, tiny_gpt2, tokens
from transformers import (
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
)

from iclutils import IclError, models, zoo
from iclutils.files import sha256, write_sums


def test_logits_and_patterns_equal_those_of_hugging_face(tmp_path: Path) -> None:
    network = save_gpt2(tmp_path)
    bridge = models.load(tmp_path)
    x = tokens(3, 20)
    with torch.no_grad():
        expected = network(x, output_attentions=True)
    logits, cache = models.cached(bridge, x, lambda name: name.endswith("hook_pattern"))
    torch.testing.assert_close(logits, expected.logits, atol=1e-4, rtol=1e-4)
    for layer, pattern in enumerate(expected.attentions):
        torch.testing.assert_close(cache["pattern", layer], pattern, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["gpt2", "neox"])
def test_patterns_scores_and_residual_can_be_edited_and_have_gradients(
    tmp_path: Path, kind: str
) -> None:
    if kind == "gpt2":
        bridge = tiny_gpt2(tmp_path)
    else:
        save_neox(tmp_path)
        bridge = models.load(tmp_path)
    x = tokens(2, 12)
    plain = models.logits(bridge, x)
    for name in ("attn.hook_pattern", "attn.hook_attn_scores", "hook_resid_pre"):
        seen = {}

        def scale(value: torch.Tensor, hook: object, seen: dict = seen) -> torch.Tensor:
            seen["value"] = (value.clone() * 0.5).requires_grad_()
            return seen["value"]

        out = bridge.run_with_hooks(x, fwd_hooks=[(f"blocks.1.{name}", scale)])
        assert (out - plain).abs().max() > 1e-4, f"editing {name} changed nothing"
        out[:, -1].logsumexp(-1).sum().backward()
        gradient = seen["value"].grad
        assert gradient is not None
        assert torch.isfinite(gradient).all()
        assert gradient.abs().max() > 0, f"no gradient reaches {name}"


@pytest.mark.parametrize("fold", [False, True])
def test_whose_attention_can_be_edited_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fold: bool
) -> None:
    """The same answer as an edit in the open: does halving the attention change anything?"""
    savers = {"gpt2": save_gpt2, "neox": save_neox, "gptj": save_gptj}
    found, seen = {}, {}
    x = tokens(1, 6)
    for name, save in savers.items():
        save(tmp_path / name)
        bridge = models.load(tmp_path / name, fold=fold and name != "gptj")
        plain = models.logits(bridge, x)
        found[name] = models.editable(bridge)
        torch.testing.assert_close(models.logits(bridge, x), plain, msg="the probe left a trace")
        hook = "blocks.0.attn.hook_pattern", lambda value, hook: value / 2
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = bridge.run_with_hooks(x, fwd_hooks=[hook])
        seen[name] = not torch.equal(out, plain)
    assert found == seen == {"gpt2": True, "neox": True, "gptj": False}
    monkeypatch.setattr(type(bridge), "run_with_hooks", None)
    assert not models.editable(bridge), "measured once, then remembered"


@pytest.mark.parametrize("name", ["hook_pattern", "hook_attn_scores"])
def test_editable_means_patterns_and_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A model on which one of the two edits is lost."""
    bridge = tiny_gpt2(tmp_path)
    assert models.editable(bridge)
    honest, other = bridge.run_with_hooks, models.load(tmp_path)

    def forgetful(x: torch.Tensor, fwd_hooks: list) -> torch.Tensor:
        def lost(edit: Callable) -> Callable:
            def run(value: torch.Tensor, hook: object) -> torch.Tensor:
                edit(value, hook)
                return value

            return run

        return honest(
            x, fwd_hooks=[(at, lost(edit) if at.endswith(name) else edit) for at, edit in fwd_hooks]
        )

    monkeypatch.setattr(other, "run_with_hooks", forgetful)
    assert not models.editable(other)


def test_the_gradient_of_a_pattern_is_right(tmp_path: Path) -> None:
    bridge = tiny_gpt2(tmp_path)
    x = tokens(1, 8)
    name = "blocks.1.attn.hook_pattern"
    _, cache = models.cached(bridge, x, [name])
    leaf = cache[name].clone().requires_grad_()

    def loss(pattern: torch.Tensor) -> torch.Tensor:
        out = bridge.run_with_hooks(x, fwd_hooks=[(name, lambda value, hook: pattern)])
        return out[0, -1, 5]

    loss(leaf).backward()
    assert leaf.grad is not None
    nudge = torch.zeros_like(leaf)
    nudge[0, 2, 6, 3] = 1e-2
    with torch.no_grad():
        slope = (loss(leaf + nudge) - loss(leaf - nudge)) / 2e-2
    torch.testing.assert_close(leaf.grad[0, 2, 6, 3], slope, atol=2e-3, rtol=2e-2)


def test_folding_keeps_predictions_and_centres_what_writes(tmp_path: Path) -> None:
    save_gpt2(tmp_path)
    plain, folded = models.load(tmp_path), models.load(tmp_path, fold=True)
    x = tokens(2, 15)
    ours = models.logits(folded, x).log_softmax(-1)
    torch.testing.assert_close(ours, models.logits(plain, x).log_softmax(-1), atol=1e-4, rtol=1e-4)
    assert folded.W_O.mean(-1).abs().max() < 1e-6 < plain.W_O.mean(-1).abs().max()


def test_weights_are_frozen_and_float32(tmp_path: Path) -> None:
    save_gpt2(tmp_path).half().save_pretrained(tmp_path)
    bridge = models.load(tmp_path)
    assert not any(p.requires_grad for p in bridge.parameters())
    assert {p.dtype for p in bridge.parameters()} == {torch.float32}


@pytest.mark.shared
def test_a_hub_checkpoint_with_the_real_tokenizer(
    tmp_path: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole hub path but for the download: pins, checksums, vocabulary of 50,257."""
    network = save_gpt2(tmp_path, vocab_size=50257, bos_token_id=50256, eos_token_id=50256)
    for file in ("vocab.json", "merges.txt"):
        shutil.copy(shared / "gpt2-tokenizer" / file, tmp_path)
    pinned = models.HUB["gpt2"].sha256
    for file in ("vocab.json", "merges.txt"):
        assert sha256(tmp_path / file) == pinned[file]
    asked: dict[str, object] = {}

    def snapshot(repo: str, **options: object) -> str:
        asked.update(options, repo=repo)
        return str(tmp_path)

    ours = {name: sha256(tmp_path / name) for name in pinned}
    monkeypatch.setattr(models, "snapshot_download", snapshot)
    monkeypatch.setitem(
        models.HUB, "gpt2", models.HubModel("openai-community/gpt2", "6" * 40, ours)
    )
    bridge = models.load("gpt2")
    assert asked["repo"] == "openai-community/gpt2"
    assert asked["revision"] == "6" * 40
    ids = bridge.to_tokens("Review: a great movie", prepend_bos=False)
    assert bridge.to_str_tokens(ids[0]) == ["Review", ":", " a", " great", " movie"]
    with torch.no_grad():
        expected = network(ids).logits
    torch.testing.assert_close(models.logits(bridge, ids), expected, atol=1e-4, rtol=1e-4)

    (tmp_path / "merges.txt").write_text("changed")
    with pytest.raises(IclError, match=r"merges.txt .*pinned SHA-256.*Delete that file"):
        models.load("gpt2")


def test_every_hub_model_is_pinned() -> None:
    for spec in models.HUB.values():
        assert len(spec.revision) == 40
        assert set(spec.revision) <= set("0123456789abcdef")
        assert all(len(digest) == 64 for digest in spec.sha256.values())
        assert {"config.json", "model.safetensors"} <= set(spec.sha256)


def test_no_network_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def unreachable(*_: object, **__: object) -> str:
        raise OSError("Name or service not known")

    monkeypatch.setattr(models, "snapshot_download", unreachable)
    with pytest.raises(IclError, match=r"Could not fetch openai-community/gpt2 .*mini tier"):
        models.load("gpt2")


def test_an_offline_hub_cache_without_the_model_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for call in ({"revision": "a" * 40}, {}):
        name = "owner/name" if call else "owner/name@" + "a" * 40
        with pytest.raises(IclError, match="Could not fetch owner/name at aaaaaaaaaaaa"):
            models.load(name, **call)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: models.load("gtp2"), "Unknown model 'gtp2'. Did you mean 'gpt2'"),
        (lambda: models.load("owner/name"), "full 40-hex commit"),
        (lambda: models.load("owner/name", revision="main"), "full 40-hex commit"),
        (lambda: models.load("owner/name-1.4b"), "full 40-hex commit"),
        (lambda: models.load("owner/name@main"), "full 40-hex commit.*got 'main'"),
        (lambda: models.load("gpt2", revision="a" * 40), "is pinned to revision"),
        (lambda: models.load("gpt2", step=3), "Only zoo models have training steps"),
        (lambda: models.load("./no/such/folder"), "There is no folder"),
    ],
)
def test_wrong_names_say_what_to_do(call: object, message: str) -> None:
    with pytest.raises(IclError, match=message):
        call()  # type: ignore[operator]


def test_broken_folders_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(IclError, match=r"no config.json"):
        models.load(tmp_path)
    network = save_gpt2(tmp_path)
    write_sums(tmp_path)
    assert models.load(tmp_path).cfg.n_layers == 3
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-4] + b"\0\1\2\3")
    with pytest.raises(IclError, match="does not match its recorded SHA-256"):
        models.load(tmp_path)
    (tmp_path / "SHA256SUMS").unlink()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(IclError, match="could not be loaded"):
        models.load(tmp_path)
    weights.unlink()
    torch.save(network.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(IclError, match=r"no .safetensors weights. Pickled weights are not loaded"):
        models.load(tmp_path)


def test_a_model_without_attention_is_refused(tmp_path: Path) -> None:
    config = MambaConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, state_size=4)
    MambaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(IclError, match=r"does not expose attention patterns|does not support"):
        models.load(tmp_path)


def test_tokens_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    bridge = tiny_gpt2(tmp_path)
    with pytest.raises(IclError, match=f"{CONTEXT + 1} tokens and the model reads at most"):
        models.logits(bridge, tokens(1, CONTEXT + 1))
    with pytest.raises(IclError, match="Token ids must lie in"):
        models.logits(bridge, torch.tensor([[1, VOCAB]]))


def test_a_model_without_words_writes_token_numbers(tmp_path: Path) -> None:
    bridge = tiny_gpt2(tmp_path)
    assert bridge.to_tokens("3 4").tolist() == [[BOS, 3, 4]]


@pytest.mark.parametrize(
    "name", [n for n in zoo.names() if "-" not in n or n.split("-")[0] in ("induction", "anchors")]
)
def test_zoo_models_equal_their_stored_weights(name: str) -> None:
    folder = zoo.folder(name)
    stored = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32).eval()
    bridge = models.load(name)
    x = torch.randint(0, bridge.cfg.d_vocab, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = stored(x).logits
    torch.testing.assert_close(models.logits(bridge, x), expected, atol=1e-4, rtol=1e-4)
