"""diff, bisect and show --tensors, through the command line."""

import json

import pytest
import torch
from support.json_documents import EXAMPLES, ordered, shape
from support.runs import state_dict, write_torch


@pytest.fixture
def turned(three):
    """Step 400 holds one NaN, and a slightly larger embedding."""
    state = state_dict(300)
    state["embed.weight"] *= 1.001
    state["embed.weight"][3, 4] = float("nan")
    torch.save(state, three / "net-400.pt")
    return three


@pytest.fixture
def prefixed(turned):
    """The state of step 400 with other names, an archive whose CRC does not fit, and its file."""
    state = torch.load(turned / "net-400.pt", weights_only=True)
    path = turned.parent / "other.pt"
    torch.save({f"module.{name}": tensor for name, tensor in state.items()}, path)
    data = bytearray(path.read_bytes())
    data[data.rindex(b"PK\x01\x02") + 16] ^= 1  # the CRC that the directory states for its last record
    path.write_bytes(data)
    return path


def test_the_document_of_diff_is_as_shown(document, turned, prefixed):
    """diff prints what json.md shows."""
    code, found = document("diff", turned / "net-300.pt", prefixed)
    assert ordered(shape(found)) == ordered(shape(EXAMPLES["diff"]))
    assert code == 3  # it could be compared, but one of the two is damaged


def test_the_document_of_bisect_is_as_shown(document, turned):
    """bisect prints what json.md shows; its diff is as in diff."""
    code, found = document("bisect", turned)
    example = shape(EXAMPLES["bisect"])
    assert found["diff"]["changes"]
    example["diff"]["changes"] = shape(EXAMPLES["diff"]["changes"])
    found_shape = shape(found)
    found_shape["diff"]["changes"] = shape(found["diff"]["changes"])
    assert ordered(found_shape) == ordered(example)
    assert (code, found["last_good"]["id"], found["first_bad"]["id"]) == (3, "300.1", "400.1")


def test_the_document_of_sums_is_as_shown(document, verified):
    """sums prints what json.md shows."""
    code, found = document("sums", verified / "net-300.pt")
    assert ordered(shape(found)) == ordered(shape(EXAMPLES["sums"]))
    assert (code, found["recorded"]) == (0, True)


def test_diff_ends_with_0_whatever_the_difference(invoke, turned):
    """A difference is an answer, not a failure; NaN is said in words, at its index."""
    result = invoke("diff", turned / "net-300.pt", turned / "net-400.pt")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "1 of 4608 became NaN, first at [3, 4]" in result.stdout
    assert result.stdout.rstrip().endswith("17 the same, 1 changed")


def test_diff_limits_what_it_shows(invoke, document, three):
    """--top is for each kind of change; what is left out is counted."""
    arguments = ("diff", three / "net-100.pt", three / "net-200.pt", "--top", 2)
    assert "and 16 more changed (--top 18)" in invoke(*arguments).stdout
    found = document(*arguments)[1]
    assert (len(found["changes"]), found["omitted"], found["counts"]["changed"]) == (2, 16, 18)


def test_names_are_escaped(invoke, root):
    """A tensor's name cannot speak to the terminal, in any of the commands."""
    torch.save({"red\x1b[31m.w": torch.ones(2)}, root / "net-1.pt")
    torch.save({"red\x1b[31m.w": torch.tensor([1.0, float("nan")]), "\u202eb": torch.ones(1)}, root / "net-2.pt")
    for arguments in (
        ("diff", root / "net-1.pt", root / "net-2.pt"),
        ("show", root / "net-2.pt", "--tensors"),
        ("bisect", root),
    ):
        shown = invoke(*arguments).stdout
        assert "\x1b" not in shown
        assert "\u202e" not in shown
        assert "red\\u001b[31m" in shown


@pytest.mark.parametrize("command", ["diff", "show", "sums"])
def test_damaged_files_end_in_a_sentence(invoke, three, command):
    """A file that cannot be read for damage is bad (3) or cannot be told (1); never a traceback."""
    (three / "net-200.pt").write_bytes((three / "net-200.pt").read_bytes()[:3000])
    places = [three / "net-200.pt"] if command != "diff" else [three / "net-100.pt", three / "net-200.pt"]
    result = invoke(command, *places)
    if command == "sums":  # whatever the bytes mean, they have a sum
        assert result.exit_code == 0
        return
    assert result.exit_code == 3
    assert "unexpected" not in result.stderr
    assert "net-200.pt" in result.stderr


def test_diff_of_what_is_not_there(invoke, three):
    """An absent checkpoint and a run end with 10."""
    assert invoke("diff", three / "net-100.pt", three / "absent").exit_code == 10
    assert invoke("diff", three / "net-100.pt", three).exit_code == 10


def test_bisect_tells_the_story(invoke, turned):
    """Each checkpoint with its verdict, the turn, what is wrong and what changed."""
    result = invoke("bisect", turned)
    assert result.exit_code == 3
    lines = result.stdout.splitlines()
    assert [line.split("<- ")[1] for line in lines if "<-" in line] == ["last good", "first bad"]
    assert "It turned bad between step 300 and step 400." in lines
    assert any(line.split()[:2] == ["finite", "embed.weight"] for line in lines)


def test_bisect_of_a_run_that_is_well(invoke, three):
    """All good: 0, and said."""
    result = invoke("bisect", three)
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, "all are good")


def test_bisect_of_a_run_that_never_was_well(invoke, root):
    """Nothing good: 13, with what is wrong in the first bad one."""
    torch.save({"w": torch.tensor([[1.0, float("inf")]])}, root / "net-1.pt")
    result = invoke("bisect", root)
    assert result.exit_code == 13
    assert "It turned bad by step 1." in result.stdout
    assert "1 +Inf of 2" in result.stdout


def test_bisect_of_an_empty_run(invoke, root):
    """Nothing to look at: 10."""
    assert invoke("bisect", root).exit_code == 10


def test_bisect_leaves_what_is_still_written(invoke, three, monkeypatch):
    """A save that is not quiet yet stays pending, is told on stderr, and nobody waits for it for long: 4."""
    invoke("verify", three)
    write_torch(three, 400, 4)
    monkeypatch.setenv("CKPTGUARD_SETTLE", "3600")
    result = invoke("bisect", three)
    assert result.exit_code == 4
    assert result.stderr == "warning: net-400.pt is still being written\n"
    assert result.stdout.splitlines()[-1] == "none is bad, but not all are good"


def test_show_lists_tensors_as_a_tree(invoke, verified):
    """Groups tell how many tensors and bytes they hold; a tensor its type, shape, bytes and magnitude."""
    lines = invoke("show", verified / "net-300.pt", "--tensors").stdout.splitlines()
    assert lines[1] == "model: 18 tensors, 90.8 KiB"
    assert "    0: 4 tensors, 18.2 KiB" in lines
    [embed] = [line.split() for line in lines if line.split()[0] == "embed.weight"]
    largest = state_dict(300)["embed.weight"].abs().max().item()
    assert embed[1:] == ["float32", "[96,", "48]", "18.0", "KiB", f"{largest:.4g}", f"{100 * largest / 65504:.2g}%"]


def test_layers_are_in_the_order_of_their_numbers(invoke, root):
    """Layer 2 comes before layer 10."""
    torch.save({f"layers.{n}.{k}": torch.ones(1) for n in range(12) for k in "ab"}, root / "net-1.pt")
    lines = invoke("show", root / "net-1.pt", "--tensors").stdout.splitlines()
    assert [int(line.split(":")[0]) for line in lines if line.strip()[0].isdigit()] == list(range(12))


def test_magnitudes_are_looked_at_where_nobody_did(document, root):
    """A stray checkpoint is read for them; NaN does not hide the largest finite magnitude."""
    torch.save({"w": torch.tensor([1.0, -65504.0, float("nan")]), "n": torch.arange(3)}, root / "net-1.pt")
    code, found = document("show", root / "net-1.pt", "--tensors")
    weight, count = found["files"][0]["tensors"]
    assert (code, weight["largest"], weight["fp16_headroom"], weight["bytes"]) == (0, 65504.0, 1.0, 12)
    assert (count["largest"], count["fp16_headroom"], count["bytes"]) == (None, None, 24)


def test_tensors_that_are_not_finite_say_so(invoke, turned):
    """In the tree a sick tensor is marked, from the verdict or from the bytes."""
    for _ in range(2):
        lines = invoke("show", turned / "net-400.pt", "--tensors").stdout.splitlines()
        assert [line.split()[0] for line in lines if line.endswith("not finite")] == ["embed.weight"]
        invoke("verify", turned)


def test_many_tensors_are_shown_in_one_go(invoke, root):
    """Thousands of tensors and very deep names: one line each, no recursion without bound."""
    state = {f"b.{i % 50}.w{i}": torch.ones(1) for i in range(3000)}
    state[".".join("x" * 3000)] = torch.ones(1)
    torch.save(state, root / "net-1.pt")
    lines = invoke("show", root / "net-1.pt", "--tensors").stdout.splitlines()
    assert sum(line.strip().startswith("w") for line in lines) == 3000


def test_json_has_no_nan(process, turned):
    """Infinite ratios are null: strict parsers read the document."""
    torch.save({"w": torch.zeros(3)}, turned / "x-1.pt")
    torch.save({"w": torch.ones(3)}, turned / "x-2.pt")
    done = process("diff", turned / "x-1.pt", turned / "x-2.pt", "--json")
    found = json.loads(done.stdout, parse_constant=pytest.fail)
    assert found["changes"][0]["difference"]["relative_l2"] is None


def test_patterns_count_in_every_command(root, invoke):
    """What only the settings call a checkpoint can be shown, summed, compared and bisected too."""
    for step in (1, 2):
        write_torch(root, step, seed=step)
        (root / f"net-{step}.pt").rename(root / f"it{step}k.weights")
    (root.parent / "ckptguard.toml").write_text('[[patterns]]\npath = "it*k.weights"\nstep = "it(\\\\d+)k"\n')
    assert "2 good" in invoke("verify", root).stdout
    first, second = root / "it1k.weights", root / "it2k.weights"
    assert "step:        1\n" in invoke("show", first).stdout
    assert "it1k.weights  (good, " in invoke("diff", first, second).stdout
    assert '"id": "2.1"' in invoke("sums", second, "--json").stdout
    result = invoke("bisect", root)
    assert (result.exit_code, "all are good" in result.stdout) == (0, True)


def test_show_names_files_within_the_checkpoint(root, invoke):
    """Paths are short, and what is no regular file is told."""
    folder = root / "checkpoint-5"
    folder.mkdir()
    torch.save(state_dict(1), folder / "pytorch_model.bin")
    (folder / "more.pt").symlink_to("/nowhere")
    result = invoke("show", folder)
    assert any(line.startswith("pytorch_model.bin ") for line in result.stdout.splitlines())
    assert "more.pt is no regular file" in result.stderr
