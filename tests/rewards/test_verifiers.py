"""Verifiers against independent judges: Python's own evaluation, brute force, decimals, and the GSM8K files' form."""

import ast
import itertools
import operator
import subprocess
import sys
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import cloudpickle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilth.core.errors import RewardError
from tilth.rewards import verifiers
from tilth.rewards.verifiers import Countdown, Gsm8k, NoExpression, builtin, countdown, gsm8k, parse

# ---- Countdown ----

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def by_python(text):
    """(value, numbers) by Python's grammar, in rationals; None and nothing where it divides by zero. The reference."""

    def value(node):
        if isinstance(node, ast.BinOp):
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        assert isinstance(node, ast.Constant) and type(node.value) is int
        found.append(node.value)
        return Fraction(node.value)

    found: list[int] = []
    tree = ast.parse(text.strip(), mode="eval").body
    try:
        return value(tree), sorted(found)
    except ZeroDivisionError:
        return None, []


numbers = st.integers(0, 99).map(str)
expressions = st.recursive(
    numbers,
    lambda inner: st.one_of(
        inner.map("({})".format),
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/", " + ", " / "]), inner).map("".join),
    ),
    max_leaves=12,
)


@given(expressions)
def test_an_expression_is_what_python_says(text):
    found = parse(text)
    value, numbers = by_python(text)
    assert found.value == value
    if value is not None:
        assert sorted(found.numbers) == numbers


@given(st.text(alphabet="0123456789+-*/() .", max_size=12))
def test_what_is_read_is_an_expression_of_python_too(text):
    """And what Python reads and we do not, has a sign in front of a number, a point, a power, // or a leading zero."""
    try:
        found = parse(text)
    except NoExpression:
        return
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError:
        assert any(token.startswith("0") and token.strip("0") for token in verifiers._tokens(text))
        return
    assert not any(isinstance(node, ast.UnaryOp) for node in ast.walk(tree))
    assert found.value == by_python(text)[0]


@pytest.mark.parametrize(
    "text, why",
    [
        ("", "its end"),
        (" ", "its end"),
        ("1+", "its end"),
        ("(1+2", "a ( without its )"),
        ("1+2)", "')' is too much"),
        ("()", "')' where a number"),
        ("1 2", "'2' is too much"),
        ("-3+5", "'-' where a number"),
        ("2**3", "'*' where a number"),
        ("2//3", "'/' where a number"),
        ("3!", "'!' does not belong"),
        ("1.5*2", "'.' does not belong"),
        ("3+4=7", "'=' does not belong"),
        ("a", "'a' does not belong"),
        ("__import__('os')", "'_' does not belong"),
        ("٣+٤", "does not belong"),
        ("²", "does not belong"),
        ("1+" * 200 + "1", "longer than 256"),
    ],
)
def test_what_is_no_expression(text, why):
    with pytest.raises(NoExpression) as error:
        parse(text)
    assert why in str(error.value)


def test_depth_and_size_are_bounded():
    assert parse("(" * 32 + "1" + ")" * 32).value == 1
    assert parse("*".join(["99"] * 80)).value == 99**80
    for text in ("(" * 33 + "1" + ")" * 33, "(" * 256, "(" * 100_000, "1+" * 128 + "1"):
        with pytest.raises(NoExpression, match="longer than 256 characters, or of more than 32 parentheses"):
            parse(text)


def graded(completion, prompt="3,25,7=46:", verifier=countdown, **info):
    found = verifier(prompt, completion, info)
    return found["reward"], found["correct"], found["format"]


@pytest.mark.parametrize(
    "prompt, completion, result",
    [
        ("3,25,7=46:", "(25-7)*3", (0, 0, 1)),
        ("3,25,7=54:", "(25-7)*3", (1, 1, 1)),
        ("3,25,7=54:", " 3 * ( 25 - 7 )\n", (1, 1, 1)),
        ("3,25,7=54:", "3*(25-7)+7-7", (0, 0, 0)),  # a number too often
        ("3,25,7=22:", "25-3", (0, 0, 0)),  # a number left out
        ("3,25,7=54:", "54", (0, 0, 0)),
        ("3,25,7=54:", "", (0, 0, 0)),
        ("3,25,7=54:", "(25-7)*3=54", (0, 0, 0)),
        ("8,3,3=8:", "8/3*3", (1, 1, 1)),  # exact in between
        ("1,3,5=0:", "1/(5-3-2)", (0, 0, 0)),
        ("5,5,1=1:", "1/(5-5)", (0, 0, 1)),  # no value, but well-formed
        ("3,3,8,8=24:", "8/(3-8/3)", (1, 1, 1)),
        ("3, 25 ,7 = 54 : ", "(25-7)*3", (1, 1, 1)),
        ("3,25,7=54:", "I think <answer> 25*3 </answer> no, <answer>(25-7)*3</answer>.", (1, 1, 1)),
        ("3,25,7=54:", "<answer>(25-7)*3</answer> or <answer>(25+7)*3</answer>", (0, 0, 1)),
    ],
)
def test_countdown(prompt, completion, result):
    assert graded(completion, prompt) == result


def test_partial_credit_is_an_option():
    partly = builtin("countdown:0.1")
    assert partly == Countdown(0.1)
    cases = [("(25-7)*3", (1, 1, 1)), ("25-7*3", (0.1, 0, 1)), ("25-7", (0, 0, 0)), ("?", (0, 0, 0))]
    assert [graded(text, "3,25,7=54:", partly) for text, _ in cases] == [result for _, result in cases]


@pytest.mark.parametrize("key", ["numbers", "nums"])
def test_numbers_and_target_of_the_data_come_before_the_prompt(key):
    info = {key: [19, 36, 55, 7], "target": 65}
    prompt = "Using the numbers [19, 36, 55, 7], create an equation that equals 65."
    assert graded("<answer>55 + 36 - 7 - 19</answer>", prompt, **info) == (1, 1, 1)
    assert graded("55+36-7-19", "1,2=3:", **info) == (1, 1, 1)


@pytest.mark.parametrize(
    "prompt, info, message",
    [
        ("make 5 of 2 and 3", {}, "needs columns numbers .or nums. and target, or prompts such as '3,25,7=46:'"),
        ("make 5", {"numbers": [2, 3]}, "needs columns"),
        ("", {"numbers": [2.5, 3], "target": 5}, "are not whole numbers"),
        ("", {"numbers": "2,3", "target": 5}, "are not whole numbers"),
        ("", {"numbers": [2, 3], "target": "5"}, "are not whole numbers"),
        ("", {"numbers": 5, "target": 5}, "are not whole numbers"),
    ],
)
def test_a_prompt_that_is_no_countdown(prompt, info, message):
    with pytest.raises(RewardError, match=message):
        countdown(prompt, "1+1", info)
    assert countdown.check({"prompt": prompt, **info})


def reachable(numbers):
    """All values of expressions of all the numbers: brute force over pairs, as texts. The reference."""
    if len(numbers) == 1:
        return {numbers[0][0]: numbers[0][1]}
    found = {}
    for i, j in itertools.permutations(range(len(numbers)), 2):
        rest = [n for k, n in enumerate(numbers) if k not in (i, j)]
        (a, left), (b, right) = numbers[i], numbers[j]
        for sign, function in (("+", operator.add), ("-", operator.sub), ("*", operator.mul), ("/", operator.truediv)):
            if sign != "/" or b:
                found |= reachable([*rest, (function(a, b), f"({left}{sign}{right})")])
    return found


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=2, max_size=3))
def test_every_value_that_can_be_reached_is_found_right_and_no_other(given_numbers):
    table = reachable([(Fraction(n), str(n)) for n in given_numbers])
    prompt = f"{','.join(map(str, given_numbers))}="
    for value, text in table.items():
        if value.denominator == 1 and value >= 0:
            assert graded(text, f"{prompt}{value}:") == (1, 1, 1)
            assert graded(text, f"{prompt}{value + 1}:") == (0, 0, 1)


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
    assert verifiers.said_number(completion) == value


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
    assert verifiers.said_number(text) == Fraction(number)
    assert graded(text, "", gsm8k, answer=f"#### {number:f}") == (1, 1, 1)
    assert graded(text, "", gsm8k, answer=f"#### {number + 1:f}") == (0, 0, 1)


@given(st.text(alphabet="#0123456789.,-$ \\boxed{}/", max_size=60))
def test_any_completion_is_right_or_wrong_and_never_missing(text):
    reward, correct, form = graded(text, "", gsm8k, answer="#### 7")
    assert reward == correct and correct <= form and {correct, form} <= {0.0, 1.0}


@given(st.text(alphabet="0123456789+-*/() <answer>", max_size=60))
def test_any_expression_is_right_or_wrong_and_never_missing(text):
    reward, correct, form = graded(text)
    assert reward == correct and correct <= form and {correct, form} <= {0.0, 1.0}


def test_long_completions_take_no_long_time():
    for text in (
        "#### " * 20_000,
        "####" + " " * 100_000,
        "\\boxed{" * 20_000,
        "#### " + "1," * 50_000,
        "#### 8" + " ,;" * 50_000 + "9",
        "#### 8 or " * 20_000,
        "<answer>" * 9_000,
    ):
        assert graded(text, "", gsm8k, answer="#### 7") == (0, 0, graded(text, "", gsm8k, answer="#### 7")[2])
        assert graded(text) == (0, 0, 0)


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
    with pytest.raises(RewardError, match="the data gives no answer"):
        builtin(spec)("", "1", {})


def test_a_given_answer_without_number_is_missing_not_wrong():
    with pytest.raises(RewardError, match="the answer has no number: 'none'"):
        gsm8k("", "#### 5", {"answer": "none"})


@pytest.mark.parametrize("spec", ["addition", "countdown:0.5", "exact", "gsm8k:0.5", "regex:a+"])
def test_a_verifier_travels_and_is_its_value(spec):
    one = builtin(spec)
    assert cloudpickle.loads(cloudpickle.dumps(one)) == one == builtin(spec) and repr(one) == repr(builtin(spec))


def test_no_torch_and_no_eval():
    code = (
        "import sys\nfrom tilth.rewards import functions, verifiers\n"
        "print(*(m in sys.modules for m in ('torch', 'numpy')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"
    tree = ast.parse(Path(verifiers.__file__).read_text())
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert not called & {"eval", "exec", "compile", "__import__"}


@pytest.mark.parametrize(
    "completion, result",
    [
        ("7,12,31", (1, 1)),
        (" 7, 12 ,031\n", (1, 1)),
        ("12,7,31", (0, 1)),
        ("7,12", (0, 0)),
        ("7,12,31,31", (0, 0)),
        ("7,12,32", (0, 0)),
        ("7,12,31,", (0, 0)),
        ("7 12 31", (0, 0)),
        ("", (0, 0)),
        ("7,,12,31", (0, 0)),
        ("7,12,3.1", (0, 0)),
        ("7,12,٣١", (0, 0)),
        ("7,12,31" + " " * 5000, (0, 0)),
    ],
)
def test_sorting(completion, result):
    found = builtin("sorting")("31,7,12=", completion, {"answer": "7,12,31"})
    assert (found["correct"], found["format"]) == result
    partly = builtin("sorting:0.25")("31,7,12=", completion, {"answer": "7,12,31"})
    assert partly["reward"] == (1.0 if result[0] else 0.25 if result[1] else 0.0)


def test_a_number_of_very_many_digits_is_none():
    digits = "1" * 65
    assert builtin("sorting")("", f"1,{digits}", {"answer": "1,2"})["format"] == 0
    assert "no list" in builtin("sorting").check({"answer": f"1,{digits}"})


@pytest.mark.parametrize("answer, wrong", [("1,2,2", ""), ("2,1", "in order"), ("1,x", "no list"), (None, "no answer")])
def test_what_sorting_says_of_given_answers(answer, wrong):
    assert (
        (wrong in builtin("sorting").check({"answer": answer}))
        if wrong
        else not builtin("sorting").check({"answer": answer})
    )
