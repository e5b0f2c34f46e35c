"""A model's tokenizer as it stands beside the weights, and what the tasks write with it."""

import json

import pytest
import torch
import transformers as hf
from tiny import as_llama2, byte_level, save_gpt2, save_reader
from tokenizers import Tokenizer, normalizers, pre_tokenizers, processors
from tokenizers.models import WordLevel

from iclutils import IclError, models
from iclutils.interp import readout
from iclutils.tasks import numbers, sources, text, topics
from iclutils.tasks.prompts import Role
from iclutils.tasks.repeated import repeated_tokens, text_twice

SHOWN = [("a great film", "good"), ("a waste of time", "bad")]


def spelled(model, tokens):
    return model.tokenizer.convert_ids_to_tokens(list(map(int, tokens)))


def test_tokenizer_json_is_read_as_it_stands(tmp_path):
    """transformers would give a GPT-2 the tokenizer of its class, with these words as merges."""
    save_gpt2(tmp_path)
    known = {word: i for i, word in enumerate(["<unk>", "<s>", "the", "cat", "sat"])}
    core = Tokenizer(WordLevel(known, unk_token="<unk>"))
    core.normalizer, core.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    core.save(str(tmp_path / "tokenizer.json"))
    named = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    model = models.load(tmp_path)
    assert models.encode(models.text_tokenizer(model), ["The CAT sat"])["input_ids"] == [[2, 3, 4]]
    assert models.bos(model) == 1
    assert model.to_tokens("the cat").tolist() == [[1, 2, 3]]
    assert model.cfg.d_vocab == 60


def test_the_first_token_is_the_tokenizer_s(tmp_path):
    """config.json may name another, or none, and its class then fills in token 1."""
    reader = byte_level()
    save_reader(tmp_path / "other", reader, bos_token_id=1)
    absent = save_reader(tmp_path / "absent", reader)
    settings = json.loads((absent / "config.json").read_text())
    del settings["bos_token_id"]
    (absent / "config.json").write_text(json.dumps(settings))
    for folder in (tmp_path / "other", absent):
        model = models.load(folder)
        assert spelled(model, text_twice(model, "a great film").tokens[0])[:2] == ["<s>", "a"]


def test_prompts_begin_with_bos_where_the_tokenizer_gives_it(tmp_path):
    model = models.load(save_reader(tmp_path, byte_level()))
    reader = models.text_tokenizer(model)
    asked, _ = sources.own_prompt(model, SHOWN, "I loved it")
    whole = "Text: a great film\nLabel: good\nText: a waste of time\nLabel: bad\nText: I loved it"
    assert asked.tokens[0].tolist() == reader(f"{whole}\nLabel:")["input_ids"]
    assert asked.roles[0, 0] == Role.FORMAT
    assert spelled(model, asked.tokens[0, asked.label_pos[0]]) == ["Ġgood", "Ġbad"]
    assert numbers.of_model(model).start == (reader.bos_token_id,)
    plain = byte_level()
    plain.backend_tokenizer.post_processor = plain.backend_tokenizer.post_processor.__class__(
        single="$A", special_tokens=[]
    )
    assert models.start_tokens(plain) == []
    assert numbers.of_text(plain).start == ()


STARTS = {"[CLS]": ["[CLS]"], "[gMASK] <sop>": ["[gMASK]", "<sop>"], "</s>": ["</s>"]}


@pytest.mark.parametrize("template", STARTS)
def test_what_a_template_puts_before_a_text_begins_it_whatever_it_is_called(template, tmp_path):
    """Tokenizers of BERT's and GLM's kind name no BOS, others one that they do not use."""
    reader = byte_level()
    core, start = reader.backend_tokenizer, STARTS[template]
    core.add_special_tokens(start)
    core.post_processor = processors.TemplateProcessing(
        single=f"{template} $A", special_tokens=[(t, core.token_to_id(t)) for t in start]
    )
    save_reader(tmp_path, reader)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"unk_token": "<s>"}))
    model = models.load(tmp_path)
    asked, _ = sources.own_prompt(model, SHOWN, "I loved it")
    assert spelled(model, asked.tokens[0])[: len(start) + 1] == [*start, "Text"]
    drawn = repeated_tokens(model, 2, 3, torch.Generator().manual_seed(0)).tokens
    assert spelled(model, drawn[:, 0]) == [start[0] if len(start) == 1 else "<s>"] * 2


def test_files_beside_a_tokenizer_json_add_nothing_to_it(tmp_path):
    """transformers would add their words at its end, and take a BOS that it does not have."""
    reader = byte_level()
    save_reader(tmp_path, reader, vocab=len(reader) + 8)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"great": len(reader)}))
    settings = {"bos_token": "[BOS]", "eos_token": {"content": "</s>"}, "pad_token": "[PAD]"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    read = models.text_tokenizer(models.load(tmp_path))
    assert len(read) == len(reader)
    assert read("a great film")["input_ids"] == reader("a great film")["input_ids"]
    assert (read.bos_token, read.eos_token, read.pad_token) == ("<s>", "</s>", "</s>")


def whole_word_folder(folder, known, **model):
    core = Tokenizer(WordLevel({word: i for i, word in enumerate(known)}, **model))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.add_special_tokens([word for word in known if word in "<s>\n"])
    reader = hf.PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>")
    return save_reader(folder, reader, eos_token_id=0)


def test_a_vocabulary_without_a_token_for_what_it_lacks_is_refused(tmp_path):
    whole_word_folder(tmp_path, ["<s>", "great", "film"], unk_token="?")
    with pytest.raises(IclError, match=r"cannot be read \(WordLevel error: Missing \[UNK\] token"):
        models.load(tmp_path)


def test_a_newline_that_is_a_special_token_is_text(tmp_path):
    known = ["?", "<s>", "\n", "great", "film", "good"]
    reader = models.text_tokenizer(models.load(whole_word_folder(tmp_path, known, unk_token="?")))
    assert models.encode(reader, ["great film\ngood"])["input_ids"] == [[3, 4, 2, 5]]
    with pytest.raises(IclError, match="cannot read '<s>' as text"):  # a word among others
        models.encode(reader, ["great <s> film"])


def test_merges_left_out_at_random_in_training_are_made(tmp_path):
    save_reader(tmp_path, byte_level())
    path = tmp_path / "tokenizer.json"
    whole = json.loads(path.read_text())
    whole["model"]["dropout"] = 0.5
    path.write_text(json.dumps(whole))
    reader = models.text_tokenizer(models.load(tmp_path))
    (ids,) = models.encode(reader, ["a waste of time"])["input_ids"]
    assert reader.convert_ids_to_tokens(ids) == ["a", "Ġwaste", "Ġof", "Ġtime"]


def test_a_model_of_text_that_writes_no_numbers_is_refused_and_not_asked_in_ids(tmp_path):
    known = ["?", "<s>", "great", "film", "->"]
    model = models.load(whole_word_folder(tmp_path, known, unk_token="?"))
    with pytest.raises(IclError, match="does not write digits as single tokens"):
        numbers.of_model(model)


def test_a_model_of_text_with_as_many_tokens_as_the_made_up_topics_reads_text(tmp_path):
    known = ["?", "<s>", *map(chr, range(ord("A"), ord("A") + topics.VOCAB - 2))]
    model = models.load(whole_word_folder(tmp_path, known, unk_token="?"))
    assert model.cfg.d_vocab == topics.VOCAB
    assert sources.compatible_tasks(model, "", ("topics",)) == ("sentiment",)
    assert sources.token_strings(model, torch.tensor([2, 4])) == ["A", "C"]


def test_text_is_text_whatever_stands_in_it(tmp_path):
    model = models.load(save_reader(tmp_path, byte_level()))
    end = model.tokenizer.eos_token_id
    shown = [("a great </s> film", "good"), SHOWN[1]]
    asked, _ = sources.own_prompt(model, shown, "I </s> loved it")
    assert end not in asked.tokens
    assert "</s>" in model.tokenizer.decode(asked.tokens[0])
    assert end not in text_twice(model, "a </s> film").tokens


def test_a_pad_token_beyond_the_embedding_is_never_read(tmp_path):
    reader = byte_level(pad_token="[PAD]")
    model = models.load(save_reader(tmp_path, reader, vocab=reader.pad_token_id))
    task = text.TextTask("t", "Text:", "Label:", (" good", " bad"))
    rows = [[("great", 0), ("bad", 1)]] * 2
    queries = [("good", 0), ("a long and bad text", 1)]
    asked = text.build(task, models.text_tokenizer(model), rows, queries, context=256)
    assert readout.target_logits(model, asked).shape == (2, len(reader) - 1)


def test_random_tokens_are_those_that_the_tokenizer_has(tmp_path):
    reader = byte_level()
    padded = models.load(save_reader(tmp_path, reader, vocab=len(reader) + 62))
    drawn = repeated_tokens(padded, 400, 20, torch.Generator().manual_seed(0)).tokens
    assert (drawn[:, 0] == reader.bos_token_id).all()
    assert drawn.max() < len(reader)
    assert not (drawn[:, 1:] == reader.bos_token_id).any()


@pytest.mark.parametrize(("digits", "line"), [(False, " 7 -> 5\n"), (True, "7 -> 5\n")])
def test_pieces_are_read_where_they_stand(digits, line):
    """Llama-2's tokenizer begins every text with a space, also that of a number or a label."""
    reader = as_llama2(digits)
    form = numbers.of_text(reader)
    xs, ys = (form.numbers[torch.tensor([[i, i, i]])] for i in (7, 5))
    ids = form.write(xs[..., None], ys)[0][0].tolist()
    assert ids == models.encode(reader, [(line * 3).lstrip()])["input_ids"][0]
    assert len(form.start) == digits
    first = text.first_tokens([" good", " bad"], reader, "Label:")
    assert reader.convert_ids_to_tokens(first) == ["▁good", "▁bad"]
    (whole,) = models.encode(reader, ["hot -> cold\n"])["input_ids"]
    cut = text.pieces_in_place(reader, [("hot", " ->", " cold", "\n")])[0]
    assert [token for piece in cut for token in piece] == whole
