"""Models of `transformers` as they are: their blocks are layers, their weights keep their names."""

import fnmatch
import inspect
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from workers.model.chain.follow import Followed
from workers.model.code.entry import ModelError, weights_follow
from workers.model.module.inputs import ALWAYS

_LOGITS: Final = "logits"
_IDS, _MASK = "input_ids", "attention_mask"
_CACHING = "use_cache"
_NOT_GIVEN = ("labels", "past_key_values", "cache", _CACHING, "return_dict")  # they are no data
_log = logging.getLogger("heterps.stage")


class HuggingFace(Followed):
    """A `transformers` model that a job trains.

    Its inputs are those of `data.columns`, by the names that its own forward has for them.

    Args:
        model: such as `AutoModelForCausalLM.from_pretrained(folder)`. It stays the same object:
            `.model.save_pretrained(folder)` of a loaded model writes what was trained.
        outputs: which of its outputs losses read; of several by their names, as heads have them.

    Raises:
        ModelError: its own loss is to have one of its routers, too.
    """

    def __init__(self, model: nn.Module, outputs: str | Sequence[str] = _LOGITS) -> None:
        super().__init__()
        if getattr(getattr(model, "config", None), "output_router_logits", False):
            raise ModelError(
                f"{type(model).__name__} has output_router_logits=True, with which transformers "
                "adds a loss of the routers to its own that no job would train by; expected "
                "output_router_logits=False, an option of hugging_face, too"
            )
        self.model = model
        self._outputs = outputs
        taken = inspect.signature(model.forward).parameters
        hands_on = [name for name, one in taken.items() if one.kind is one.VAR_KEYWORD]
        self._takes = tuple(name for name in taken if name not in (*_NOT_GIVEN, *hands_on))
        asked = [model]
        if hands_on:  # a head may do so with its body, and that with a decoder, which has it
            body = getattr(model, "base_model", model)
            decoder = getattr(body, "get_decoder", lambda: None)()  # None: room for one, and none
            asked += [body] if decoder is None else [body, decoder]
        caches = any(_CACHING in inspect.signature(one.forward).parameters for one in asked)
        self._settings = {_CACHING: False} if caches else {}

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor | dict[str, Tensor]:
        """The named outputs, [B, …] each."""
        given = {name: tensor for name, tensor in batch.items() if name not in ALWAYS}
        self._check(given)
        found = self.model(**given, **self._settings, return_dict=True)
        if isinstance(self._outputs, str):
            return self._output(found, self._outputs)
        return {name: self._output(found, name) for name in self._outputs}

    def _check(self, given: Mapping[str, Tensor]) -> None:
        """Refuse inputs that the model would leave out, and padding that it would not know of."""
        kind = type(self.model).__name__
        for name in given:
            if name not in self._takes:
                raise ModelError(
                    f"data.columns.{name}: no input of {kind}; expected one of "
                    f"{', '.join(self._takes)}"
                )
        if _IDS in given and _MASK in self._takes and _MASK not in given:
            raise ModelError(
                f"data.columns: {_IDS} without {_MASK}, so that {kind} would take what fills up "
                f"short lists for tokens; expected, for example, {_MASK}: "
                f"{{of: {_IDS}, type: mask, length: {given[_IDS].shape[1]}}}"
            )

    def _output(self, found: Mapping[str, Any], name: str) -> Tensor:
        output = found.get(name)
        if not isinstance(output, Tensor):
            there = [key for key, value in found.items() if isinstance(value, Tensor)]
            raise ModelError(
                f"{type(self.model).__name__} gives no {name!r}; expected one of {', '.join(there)}"
            )
        return output


def hugging_face(
    folder: str | Path,
    task: str,
    *,
    new: Sequence[str] = (),
    outputs: str | Sequence[str] = _LOGITS,
    **options: Any,
) -> HuggingFace:
    """A pretrained `transformers` model from a local folder, in float32.

    Where a saved model is loaded, whose weights follow, the folder's configuration is enough.

    Args:
        folder: as `save_pretrained` writes it.
        task: what AutoModelFor has for it: SequenceClassification, CausalLM, MaskedLM, …
        new: patterns of the names of weights that the folder has not and that begin anew, such as
            classifier.*.
        outputs: as of `HuggingFace`.
        options: of `from_pretrained`, such as num_labels or attn_implementation.

    Raises:
        ModelError: no such task or folder, or weights are missing that `new` does not name; and as
            of `HuggingFace`.
    """
    import transformers

    kind = getattr(transformers, f"AutoModelFor{task}", None)
    if kind is None:
        raise ModelError(f"hugging_face: no AutoModelFor{task}; expected such as CausalLM")
    place = Path(folder)
    if not (place / "config.json").is_file():
        raise ModelError(
            f"hugging_face: {place / 'config.json'}: no such file; expected the folder of a "
            "pretrained model, as save_pretrained writes it"
        )
    options = {"dtype": torch.float32, **options}
    if weights_follow():
        names = ("attn_implementation", "dtype", "trust_remote_code")
        built = {name: options.pop(name) for name in names if name in options}
        config = transformers.AutoConfig.from_pretrained(place, local_files_only=True, **options)
        return HuggingFace(kind.from_config(config, **built), outputs)
    model, found = kind.from_pretrained(
        place, local_files_only=True, output_loading_info=True, **options
    )
    missing = {*found["missing_keys"], *(one[0] for one in found["mismatched_keys"])}
    if unnamed := sorted(n for n in missing if not any(fnmatch.fnmatch(n, p) for p in new)):
        raise ModelError(
            f"hugging_face: {place} has no {', '.join(unnamed)}, of {type(model).__name__}, which "
            f"would begin anew; expected them there, or new={unnamed[:1]} where they are to"
        )
    if found["unexpected_keys"]:
        left = ", ".join(sorted(found["unexpected_keys"]))
        _log.warning("of %s not in the model: %s", place, left)
    return HuggingFace(model, outputs)
