"""Verifiers against independent judges: Python's own evaluation, brute force, decimals, and the GSM8K files' form."""

import ast
import subprocess
import sys
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import cloudpickle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.errors import raises
from tilth.config.code import parse
from tilth.core.errors import RewardError
from tilth.rewards import verifiers
from tilth.rewards.verifiers import Gsm8k, builtin

gsm8k = builtin("gsm8k")


def graded(completion, prompt, verifier, **info):
    found = verifier(prompt, completion, info)
    return found["reward"], found["correct"], found["format"]


# ---- GSM8K ----


@pytest.mark.parametrize(
    "completion, value",
    [
        ("#### 72", 72),
        ("She sold 48+24.\n#### 72", 72),
        ("####72", 72),
        ("#### 72.", 72),
        ("#### 72...", 72),
        ("#### $72", 72),
        ("#### \\$72", 72),
        ("#### -72", -72),
        ("#### -$72", -72),
        ("#### $-72", -72),
        ("#### 1,234", 1234),
        ("#### 1,234,567.50", Fraction(2469135, 2)),
        ("#### 72.00", 72),
        ("#### .5", Fraction(1, 2)),
        ("#### 072", 72),
        ("#### 72 apples", 72),
        ("#### 72%", 72),
        ("#### 72, of course", 72),
        ("#### **72**", 72),
        ("**#### 72**", 72),
        ("#### 5\n#### 72", 72),
        ("#### 72\n#### nothing", 72),
        ("#### 72 \n5 more", 72),
        ("#### \\boxed{72}", 72),
        ("so \\boxed{72}", 72),
        ("\\boxed{5} and \\boxed{72}", 72),
        ("\\boxed{ 72 }", 72),
        ("\\boxed {72}", 72),
        ("\\boxed{\\$72}", 72),
        ("\\boxed{72\\%}", 72),
        ("\\boxed{72\\text{ apples}}", 72),
        ("\\boxed{72 \\text{ apples}}", 72),
        ("\\boxed{1{,}234}", 1234),
        ("\\boxed{5}, that is\n#### 72", 72),
        ("#### " + "9" * 64, int("9" * 64)),
        ("72", None),
        ("the answer is 72", None),
        ("### 72", None),
        ("####", None),
        ("#### seventy-two", None),
        ("####\n72", None),
        ("#### 3/4", None),
        ("#### 3 / 4", None),
        ("#### 3,4", None),
        ("#### 12,34", None),
        ("#### 1234,567", None),
        ("#### 1.2.3", None),
        ("#### 2e3", None),
        ("#### 2^3", None),
        ("#### 2*3", None),
        ("#### 5-3", None),
        ("#### 5 + 3 = 8", None),
        ("#### 72x", None),
        ("#### 7 2", None),
        ("#### 7\t2", None),
        ("#### 1,000 000", None),
        ("#### 18, 3", None),
        ("#### 18; 3", None),
        ("#### 18, -3", None),
        ("#### $18 $3", None),
        ("#### 18 \\$3", None),
        ("#### 18 .5", None),
        ("#### 5 x 3", None),
        ("#### 5 x3", None),
        ("#### 5 × 3", None),
        ("#### 5×3", None),
        ("#### 6 ÷ 3", None),
        ("#### 5–3", None),
        ("#### 5 or 6", None),
        ("#### 5 and 6", None),
        ("#### 5 to 6", None),
        ("\\boxed{18\\,000}", None),
        ("\\boxed{18, 3}", None),
        ("#### 4\n#### 5 or 6", 4),
        ("#### 72 x", 72),
        ("#### 72 apples, 3 pears", 72),
        ("#### 72, that is 3 more", 72),
        ("#### 72.", 72),
        ("#### 72, ", 72),
        ("#### 72,\n5", 72),
        ("#### 5:30", None),
        ("#### --5", None),
        ("#### -$-5", None),
        ("#### ٧٢", None),
        ("#### " + "9" * 65, None),
        ("#### " + "9" * 10_000, None),
        ("\\boxed{x=72}", None),
        ("\\boxed{\\frac{1}{2}}", None),
        ("\\boxed{3\\frac{1}{2}}", None),
        ("\\boxed{2\\cdot 3}", None),
        ("\\boxed{72", 72),
        ("", None),
    ],
)
def test_the_number_that_a_completion_says(completion, value):
    assert verifiers.marked_number(completion) == value


@pytest.mark.parametrize(
    "completion, result",
    [("#### 1,000", (1, 1, 1)), ("#### 1000.0", (1, 1, 1)), ("#### 1001", (0, 0, 1)), ("1000", (0, 0, 0))],
)
@pytest.mark.parametrize(
    "answer", ["2*500 = <<2*500=1000>>1000\n#### 1,000", "\\boxed{1000}", "1000", " 1,000. ", 1000]
)
def test_gsm8k(completion, result, answer):
    assert graded(completion, "", gsm8k, answer=answer) == result


def test_gsm8k_with_credit_for_the_form():
    partly = builtin("gsm8k:0.25")
    assert partly == Gsm8k(0.25)
    assert [graded(c, "", partly, answer="#### 5")[0] for c in ("#### 5", "#### 6", "5")] == [1, 0.25, 0]


decimals = st.decimals(-(10**12), 10**12, allow_nan=False, places=3) | st.integers(-(10**12), 10**12).map(Decimal)


@given(
    decimals,
    st.sampled_from(["{:f}", "{:,f}"]),
    st.sampled_from(["#### {}", "\\boxed{{{}}}", "####{}.", "a\n#### {} b"]),
)
def test_numbers_are_equal_as_rationals(number, form, place):
    """The reference is Python's decimal arithmetic."""
    text = place.format(form.format(number))
    assert verifiers.marked_number(text) == Fraction(number)
    assert graded(text, "", gsm8k, answer=f"#### {number:f}") == (1, 1, 1)
    assert graded(text, "", gsm8k, answer=f"#### {number + 1:f}") == (0, 0, 1)


@given(st.text(alphabet="#0123456789.,-$ \\boxed{}/", max_size=60))
def test_any_completion_is_right_or_wrong_and_never_missing(text):
    reward, correct, form = graded(text, "", gsm8k, answer="#### 7")
    assert reward == correct and correct <= form and {correct, form} <= {0.0, 1.0}


def test_long_completions_take_no_long_time():
    for text in (
        "#### " * 20_000,
        "####" + " " * 100_000,
        "\\boxed{" * 20_000,
        "#### " + "1," * 50_000,
        "#### 8" + " ,;" * 50_000 + "9",
        "#### 8 or " * 20_000,
    ):
        assert graded(text, "", gsm8k, answer="#### 7") == (0, 0, graded(text, "", gsm8k, answer="#### 7")[2])


# ---- exact, regex, and what they are called ----


@pytest.mark.parametrize(
    "completion, answer, right",
    [("yes", "yes", 1), (" yes\n", "yes ", 1), ("Yes", "yes", 0), ("7", 7, 1), ("", "x", 0)],
)
def test_exact(completion, answer, right):
    assert builtin("exact")("", completion, {"answer": answer}) == right


@pytest.mark.parametrize(
    "pattern, completion, found",
    [("####", "a #### b", 1), ("####", "a", 0), (r"^\d+$", "12", 1), ("(?i)yes", "YES", 1), ("a:b", "xa:by", 1)],
)
def test_regex(pattern, completion, found):
    assert builtin(f"regex:{pattern}")("", completion, {}) == found


@pytest.mark.parametrize(
    "spec, message",
    [
        ("regex:(a", "'regex:(a': missing ), unterminated subpattern at character 1 of the pattern, before '(a'"),
        ("regex:ab[c", "unterminated character set at character 3 of the pattern, before '[c'"),
        ("regex:a**", "multiple repeat at character 3"),
        ("regex:ab\\", "bad escape"),
        ("regex:", "has no pattern"),
        ("regex:a{99999999999}", "too large a pattern"),
        ("gsm8k:", "'gsm8k:': after the colon comes the reward of a well-formed wrong answer"),
        ("gsm8k:1", "from 0 to below 1, as in gsm8k:0.1"),
        ("countdown:-0.1", "as in countdown:0.1"),
        ("countdown:nan", "as in countdown:0.1"),
        ("countdown:much", "'countdown:much'"),
    ],
)
def test_a_bad_option_is_told_with_its_place(spec, message):
    with pytest.raises(RewardError) as error:
        builtin(spec)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_other_names_are_nobodys():
    assert (
        builtin("gsm9k") is None
        and builtin("my.py:gsm8k") is None
        and builtin("exact:1") is None
        and builtin("") is None
    )
    assert builtin("gsm8k") is gsm8k


@pytest.mark.parametrize(
    "spec, info, wrong",
    [
        ("addition", {"answer": "0579"}, ""),
        ("addition", {"answer": "5.5"}, "the answer is no integer"),
        ("addition", {}, "there is no answer"),
        ("exact", {"answer": "x"}, ""),
        ("exact", {"answer": " \n"}, "the answer is empty"),
        ("exact", {"answer": None}, "there is no answer"),
        ("gsm8k", {"answer": "so\n#### 1,200"}, ""),
        ("gsm8k", {"answer": "so 1,200"}, "the answer has no number"),
        ("gsm8k", {"answer": "#### about 5"}, "the answer has no number"),
        ("gsm8k", {"question": "?"}, "there is no answer"),
        ("countdown", {"prompt": "3,4=7:"}, ""),
        ("countdown", {"prompt": "3,4=7:", "answer": "4+3"}, ""),
        ("countdown", {"prompt": "3,4=7:", "answer": "4*3"}, "the answer does not make 7 of 3, 4"),
        ("countdown:0.1", {"nums": [3, 4], "target": 12, "answer": "4*3"}, ""),
        ("regex:x", {}, ""),
    ],
)
def test_what_is_wrong_with_the_given_answer(spec, info, wrong):
    assert builtin(spec).check(info) == wrong


@pytest.mark.parametrize("spec", ["addition", "exact", "gsm8k"])
def test_without_an_answer_nothing_can_be_judged(spec):
    with raises(RewardError, "answer"):
        builtin(spec)("", "1", {})


def test_a_given_answer_without_number_is_missing_not_wrong():
    with raises(RewardError, "answer.number"):
        gsm8k("", "#### 5", {"answer": "none"})


@pytest.mark.parametrize("spec", ["addition", "countdown:0.5", "exact", "gsm8k:0.5", "regex:a+"])
def test_a_verifier_travels_and_is_its_value(spec):
    one = builtin(spec)
    assert cloudpickle.loads(cloudpickle.dumps(one)) == one == builtin(spec) and repr(one) == repr(builtin(spec))


def test_no_torch_no_numpy_and_no_eval():
    code = (
        "import sys\nfrom tilth.rewards import functions, process, verifiers\n"
        "assert all(map(functions.load_reward, verifiers.verifier_names()))\n"
        "assert functions.load_reward('addition')('1+1=', '2', {'answer': '2'}) == 1.0\n"
        "print('numpy' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"
    files = [Path(verifiers.__file__), *(Path(verifiers.__file__).parents[1] / "tasks").glob("*.py")]
    tree = ast.Module([parse(file.read_text()) for file in files], [])
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert not called & {"eval", "exec", "compile", "__import__"}
