"""Errors are structured, read-only, and survive the trip between processes."""

import contextlib
import copy
import pickle

import pytest

from thunder_xform import errors
from thunder_xform.errors import (
    CycleError,
    DuplicateClaimError,
    LoadError,
    ManifestError,
    OptionError,
    PipelineError,
    RequestSyntaxError,
    ResolutionError,
    UnknownOptionError,
    VerificationError,
    XformError,
)

EXAMPLES = [
    ManifestError("p.", "r.", file="m.toml", field="stage", distribution="d 1"),
    UnknownOptionError(plugin="lora", distribution="d 1", option="rnk", known=["rank", "alpha"]),
    CycleError("p.", "r.", cycle=("a", "b"), edges=("x", "y")),
    DuplicateClaimError(name="fsdp", distributions=["a 1", "b 2"]),
    RequestSyntaxError("p.", text="a b", position=2),
    LoadError("p.", "r.", plugin="a", distribution="d", version="1", entry_point="m:f", target="m:C"),
    OptionError("p.", "r.", plugin="a", distribution="d", option="o", value="1"),
    VerificationError("lora", "d 1", "before_autograd", "proxy t3 dangles", before="old", after="new"),
    PipelineError("p.", "r."),
]


def test_every_error_is_exported_and_derives_from_the_base():
    classes = {n: c for n, c in vars(errors).items() if isinstance(c, type) and issubclass(c, XformError)}
    assert sorted(classes) == sorted(errors.__all__)
    assert list(errors.__all__) == sorted(errors.__all__)


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("trip", [copy.copy, lambda e: pickle.loads(pickle.dumps(e))], ids=["copy", "pickle"])
def test_fields_and_message_survive(error, trip):
    other = trip(error)
    assert type(other) is type(error)
    assert str(other) == str(error)
    assert other.fields == error.fields
    assert other.args == error.args


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_fields_are_read_only(error):
    for name in error.fields:
        with pytest.raises(AttributeError, match="read-only"):
            setattr(error, name, None)


def test_interpreter_and_contextlib_may_annotate_an_error():
    @contextlib.contextmanager
    def manager():
        yield

    error = PipelineError("p.", "r.")
    error.add_note("a note")
    with pytest.raises(PipelineError) as caught, manager():
        raise error from KeyError("cause")
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.__notes__ == ["a note"]


def test_messages_have_problem_then_remedy():
    assert str(UnknownOptionError(plugin="lora", distribution="d 1", option="rnk", known=["rank", "alpha"])) == (
        "'lora' [d 1] has no option 'rnk'. Did you mean 'rank'? Its options are rank and alpha."
    )
    assert str(XformError("Only a problem.")) == "Only a problem."
    assert issubclass(UnknownOptionError, ResolutionError)


def test_verification_error_names_the_plugin_and_keeps_both_traces():
    error = EXAMPLES[-2]
    assert str(error) == (
        "'lora' [d 1] broke an invariant in before_autograd: proxy t3 dangles. "
        "Report it to the plugin's authors, with the traces in this error's `before` and `after`."
    )
    assert (error.before, error.after) == ("old", "new")
