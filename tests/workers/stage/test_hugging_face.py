"""Models of `transformers` over any plan against plain PyTorch training of the untouched model."""

from importlib import import_module
from importlib.util import find_spec
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import heterps
from protos.job_pb2 import ColumnSpec, JobSpec
from ps.local.table import save_checkpoint
from tests.workers.stage.in_process import Pipeline
from workers.data import Dataset, GlobalBatches
from workers.data.tensors import tensors_of
from workers.model.chain.hugging_face import HuggingFace, hugging_face
from workers.model.chain.trace import TracedModel
from workers.model.code.entry import ModelError, job_model
from workers.model.module.inputs import inputs_of
from workers.model.module.randomness import Randomness
from workers.model.objective.curve import LossCurve
from workers.model.saved.model import SavedModel

# What is computed between blocks has tests without transformers, of which an import takes seconds.
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(find_spec("transformers") is None, reason="needs heterps[huggingface]"),
]

WORDS, LENGTH, ROWS, STEPS = 40, 12, 96, 30
EPS = 1e-4  # the bias of keys has a gradient of 0, which Adam would make steps of
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 3}
GPT2 = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def the(name):
    return getattr(import_module("transformers"), name)


def bert(**settings):
    config = the("BertConfig")(**{**SIZES, **BERT, **settings})
    return the("BertForSequenceClassification")(config)


def distilbert(**settings):
    small = {"vocab_size": WORDS, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24}
    off = {"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0, "num_labels": 3}
    config = the("DistilBertConfig")(**{**small, **off, **settings})
    return the("DistilBertForSequenceClassification")(config)


def gpt2(**settings):
    small = {"n_embd": 16, "n_layer": 2, "n_head": 2}
    return the("GPT2LMHeadModel")(the("GPT2Config")(**{**SIZES, **small, **GPT2, **settings}))


def llama(**settings):
    return the("LlamaForCausalLM")(the("LlamaConfig")(**{**SIZES, **settings}))


def granite_moe(**settings):
    few = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    return the("GraniteMoeForCausalLM")(the("GraniteMoeConfig")(**{**SIZES, **few, **settings}))


def answers():
    return the("LlamaForQuestionAnswering")(the("LlamaConfig")(**SIZES))


def built(make, **settings):
    def build():
        torch.manual_seed(5)
        return HuggingFace(make(**settings))

    return build


@pytest.fixture
def job(tmp_path):
    rng = np.random.default_rng(0)
    lists = []
    for _ in range(ROWS):
        first, size = rng.integers(0, WORDS - 1), rng.integers(2, LENGTH + 1)
        lists.append([int(first + 7 * i) % (WORDS - 1) + 1 for i in range(size)])
    table = {
        "ids": pa.array(lists, pa.list_(pa.int32())),
        "kind": pa.array([one[0] % 3 for one in lists]),
    }
    pq.write_table(pa.table(table), tmp_path / "a.parquet", row_group_size=9)
    job = JobSpec(directory=str(tmp_path))
    job.data.path, job.data.train = ".", "a.parquet"
    ids = {"of": "ids", "length": LENGTH}
    job.data.columns["input_ids"].CopyFrom(ColumnSpec(type="ints", **ids))
    job.data.columns["attention_mask"].CopyFrom(ColumnSpec(type="mask", **ids))
    job.train.batch_size, job.train.seed, job.train.epochs = 10, 3, 4
    job.train.optimizer.name, job.train.optimizer.learning_rate = "adamw", 0.01
    job.train.optimizer.eps = EPS
    job.data.label, job.train.loss = "kind", "cross_entropy"
    return job


def plain(build, batches):
    """What one process of plain PyTorch comes to; the model computes its loss by itself."""
    model, losses = build().model, []
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=EPS, weight_decay=0.0)
    for batch in batches:
        ids, mask = batch["input_ids"], batch["attention_mask"]
        labels = batch["label.label"]
        if labels.ndim > 1:
            labels = ids.masked_fill(mask == 0, -100)
        optimizer.zero_grad()
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


def trained(job, build, cuts, widths, micro_batches=3):
    read = GlobalBatches.of(job, Dataset.of(job, "train"))
    steps = [read.read(step) for step in range(STEPS)]
    return Pipeline(job, build, cuts, widths, steps, micro_batches).run(), map(tensors_of, steps)


PLANS = {"alone": ([-1], [1]), "stages": ([2, -1], [1, 1]), "workers": ([-1], [2])}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("make", [bert, distilbert, llama, gpt2, granite_moe])
def test_a_model_trains_as_by_itself(job, make, plan):
    """To 1e-5 over 30 steps, of masked lists of tokens, a decoder by the mean over all tokens."""
    of_text = make in (llama, gpt2, granite_moe)
    if of_text:
        job.data.label, job.train.loss = "ids", "next_token"
    build = built(make, tie_word_embeddings=False) if of_text else built(make)
    cuts, widths = PLANS[plan]
    last = len(TracedModel(build(), inputs_of(job.data)).layers) - 1
    workers, batches = trained(job, build, [*cuts[:-1], last], widths)
    model, losses = plain(build, batches)
    assert losses[-1] < 0.9 * losses[0]
    assert workers[-1][0].executor.progress.losses == pytest.approx(losses, rel=1e-5)
    state = {f"model.{name}": value for name, value in model.state_dict().items()}
    for worker in chain(*workers):
        for name, value in worker.module.state_dict().items():
            torch.testing.assert_close(value, state[name], rtol=1e-4, atol=1e-4)


def test_blocks_that_compute_twice_train_as_by_themselves(job):
    """Gradient checkpointing is the model's own."""
    job.data.label, job.train.loss = "ids", "next_token"

    def build():
        model = built(llama, tie_word_embeddings=False)()
        model.model.gradient_checkpointing_enable()
        return model

    workers, batches = trained(job, build, [3, 5], [1, 1])
    _, losses = plain(built(llama, tie_word_embeddings=False), batches)
    assert workers[-1][0].executor.progress.losses == pytest.approx(losses, rel=1e-5)


def test_a_head_hands_on_that_its_body_keeps_no_cache(job):
    torch.manual_seed(5)
    model = answers()
    traced = TracedModel(HuggingFace(model, ["start_logits", "end_logits"]), inputs_of(job.data))
    ids = torch.randint(1, WORDS, (6, LENGTH))
    values, last = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, len(traced.layers)
    expected = model(**values)
    for first, until in ((0, 1), (2, last - 1)):
        stage = traced.stage(first, until)
        results = stage.module(*(values[name] for name in stage.inputs))
        values = dict(zip(stage.outputs, results, strict=True))
    found = sorted(value.detach().sum().item() for value in values.values())
    assert found == sorted(expected[name].sum().item() for name in ("start_logits", "end_logits"))


def test_a_body_hands_on_that_its_decoder_keeps_no_cache(job):
    """Of T5 with experts, whose head and body name no such argument."""
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    sizes |= {"vocab_size": WORDS, "num_experts": 4, "tie_word_embeddings": False}
    torch.manual_seed(5)
    config = the("SwitchTransformersConfig")(**sizes, expert_capacity=ROWS * LENGTH)
    model = the("SwitchTransformersForConditionalGeneration")(config).eval()
    job.data.columns["decoder_input_ids"].CopyFrom(job.data.columns["input_ids"])
    traced = TracedModel(HuggingFace(model), inputs_of(job.data))
    ids = torch.randint(1, WORDS, (6, LENGTH))
    values = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "decoder_input_ids": ids}
    expected, last = model(**values).logits, len(traced.layers) - 1
    for first, until in ((0, 3), (4, last)):
        stage = traced.stage(first, until)
        results = stage.module(*(values[name] for name in stage.inputs))
        values = dict(zip(stage.outputs, results, strict=True))
    (found,) = values.values()
    torch.testing.assert_close(found, expected)


def test_a_body_may_have_no_decoder_where_others_have_one():
    sizes = {"d_model": 32, "d_latents": 32, "num_latents": 4, "vocab_size": WORDS}
    sizes |= {"num_self_attends_per_block": 1, "max_position_embeddings": LENGTH}
    model = the("PerceiverModel")(the("PerceiverConfig")(**sizes))
    assert model.get_decoder() is None
    HuggingFace(model)  # refused, if it is, where it is cut


def test_dropout_is_on_in_training_whatever_mode_it_came_in_and_follows_from_the_seed(job):
    torch.manual_seed(5)
    model = HuggingFace(bert(hidden_dropout_prob=0.3).eval())
    traced = TracedModel(model, inputs_of(job.data))
    ids = torch.randint(1, WORDS, (6, LENGTH))
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    found = []
    for cuts in ([5], [1, 5], [2, 3, 5]):
        values, first = dict(given), 0
        for last in cuts:
            stage = traced.stage(first, last)
            stage.module.train()
            with Randomness(stage.module, 7, fixed=True).drawing(3, 1):
                results = stage.module(*(values[name] for name in stage.inputs))
            values, first = dict(zip(stage.outputs, results, strict=True)), last + 1
        found += values.values()
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    model.eval()
    assert not torch.allclose(found[0], model(given), rtol=0.01)


def test_a_tied_head_stays_with_its_embedding(job):
    traced = TracedModel(built(gpt2)(), inputs_of(job.data))
    with pytest.raises(ModelError, match=r"share 'model\.transformer\.wte\.weight'"):
        traced.stage(0, 2)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda columns: columns.pop("attention_mask"), "input_ids without attention_mask"),
        (
            lambda columns: columns["mask"].CopyFrom(columns["attention_mask"]),
            r"data\.columns\.mask: no input of Bert",
        ),
    ],
)
def test_inputs_that_the_model_would_not_see_are_refused(job, change, expected):
    change(job.data.columns)
    with pytest.raises(ModelError, match=expected):
        TracedModel(built(bert)(), inputs_of(job.data))


def test_a_loss_of_routers_is_not_left_out_silently(tmp_path):
    sizes = {"num_key_value_heads": 2, "num_local_experts": 2, "output_router_logits": True}
    the("MixtralForCausalLM")(the("MixtralConfig")(**SIZES, **sizes)).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="MixtralForCausalLM has output_router_logits=True"):
        hugging_face(tmp_path, "CausalLM")
    assert hugging_face(tmp_path, "CausalLM", output_router_logits=False).model is not None


def test_a_folder_without_weights_of_the_head_is_refused(tmp_path):
    torch.manual_seed(0)
    body = the("BertModel")(bert().config)
    body.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"no classifier\.bias, classifier\.weight"):
        hugging_face(tmp_path, "SequenceClassification", num_labels=3)
    model = hugging_face(tmp_path, "SequenceClassification", num_labels=3, new=["classifier.*"])
    for name, value in body.state_dict().items():
        assert torch.equal(model.model.bert.state_dict()[name], value)


def test_what_was_trained_is_saved_and_opened_by_transformers_bit_equal(tmp_path, job):
    """Also where of the pretrained folder only its configuration is left."""
    folder, output = tmp_path / "pretrained", tmp_path / "out"
    gpt2().save_pretrained(folder)
    (tmp_path / "model.py").write_text(
        "import heterps\n"
        f"def build():\n    return heterps.hugging_face({str(folder)!r}, 'CausalLM')\n"
    )
    job.model.entry = "model.py:build"
    model = job_model(job)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    saved = SavedModel(str(output))
    saved.write_stage(0, model.state_dict())
    save_checkpoint(saved.tables, [])
    saved.finish(job, 1, LossCurve([0.5]), {"job_id": "job1"})
    (folder / "model.safetensors").unlink()
    opened = heterps.load(output)
    assert opened.model.lm_head.weight is opened.model.transformer.wte.weight
    opened.model.save_pretrained(tmp_path / "trained")
    again = the("AutoModelForCausalLM").from_pretrained(tmp_path / "trained")
    for name, value in model.model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)
    words = [[3, 1, 4], [1, 5]]
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    expected = again.eval()(input_ids=torch.tensor([[3, 1, 4], [1, 5, 0]]), attention_mask=mask)
    scores = opened.predict({"ids": words}, logits=True)
    torch.testing.assert_close(scores[0, :3], expected.logits[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(scores[1, :2], expected.logits[1, :2], rtol=1e-4, atol=1e-4)
