from pathlib import Path

import pytest

from perf_metrics import Application, Device, FleetSamples, JobFacts, fleet_report, read_applications


def test_a_table_and_a_list_of_objects_say_the_same(tmp_path: Path) -> None:
    table, objects = tmp_path / "mfu.csv", tmp_path / "mfu.json"
    table.write_text(
        "job,mfu,run,gpus,recomputes,total_parameters,sequence_length,compute_dtype\n"
        "a,0.42,pretrain,512,yes,16e9,4096,fp8\nb,,,,,,,\n"
    )
    objects.write_text(
        '[{"job": "a", "mfu_percent": 42, "run": "pretrain", "gpus": 512, "recomputes": true,'
        ' "total_parameters": 16e9, "sequence_length": 4096, "compute_dtype": "fp8"},'
        ' {"job": "b", "mfu": null}]'
    )
    facts = JobFacts(recomputes=True, total_parameters=16e9, sequence_length=4096, compute_dtype="fp8")
    expected = {"a": Application(0.42, "pretrain", 512, facts), "b": Application(None)}
    assert read_applications(table) == read_applications(objects) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("job,mfu\na,42\n", "line 2, job a: mfu=42 must be a share, such as 0.42 for 42 %"),
        ("job,mfu\na,0.4\na,0.5\n", "line 3: job='a' is there twice"),
        ("job,mfuu\na,0.4\n", "unknown column 'mfuu'. Did you mean 'mfu'"),
        ("job,mfu\na,x\n", "job a: mfu='x' must be a number"),
        ("job,mfu\na,nan\n", "must be a finite number"),
        ("job,mfu\n,0.4\n", "line 2 has no job"),
        ("job,mfu\na\n", "line 2 does not have as many fields"),
        ("job,mfu,gpus\na,0.4,7.5\n", "gpus=7.5 must be a whole number"),
        ("job,mfu,hybrid\na,0.4,maybe\n", "hybrid='maybe' must be true or false"),
        ("job,mfu,mfu_percent\na,0.4,40\n", "give mfu or mfu_percent, not both"),
    ],
)
def test_what_a_table_may_not_hold_is_named_by_its_row(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mfu.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        read_applications(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "mfu.json"
    path.write_text('{"a": 0.4}')
    with pytest.raises(ValueError, match="must be a list of objects"):
        read_applications(path)
    for hostile in ("[" * 100_000, "[" + "9" * 5000 + "]"):
        path.write_text(hostile)
        with pytest.raises(ValueError, match="is not JSON"):
            read_applications(path)
    table = tmp_path / "mfu.csv"
    table.write_text("job,mfu\n" + "a" * 200_000 + ",0.4\n")
    with pytest.raises(ValueError, match="is not a table"):
        read_applications(table)
    with pytest.raises(ValueError, match=r"must be a \.csv or a \.json file"):
        read_applications(tmp_path / "mfu.txt")


def test_a_type_without_a_known_rate_in_one_row_does_not_stop_the_report(tmp_path: Path) -> None:
    path = tmp_path / "mfu.csv"
    path.write_text("job,mfu,compute_dtype,peak_dtype\na,0.5,fp4,bf16\nb,0.4,int4,bf16\n")
    applications = read_applications(path)
    assert applications["a"].facts == JobFacts(compute_dtype="fp4", peak_dtype="bf16")
    assert applications["b"].facts == JobFacts(peak_dtype="bf16")
    fleet = FleetSamples(start=0, end=3600, step_s=30, tensor_mhz=1000)
    for step in range(120):
        fleet.add("a", Device("node", "0"), 30.0 * step, 0.125, 1000)
    report = fleet_report(fleet, applications)
    # FP4 runs at four times the rate of BF16.
    assert report.jobs[0].candidates[0].name == "fp4 work against the bf16 peak"
    (note,) = (one for one in report.notes if "int4" in one)
    assert note.startswith("job b: compute_dtype='int4' is none of fp4, fp8, bf16")


def test_shares_of_the_work_by_type(tmp_path: Path) -> None:
    table, objects = tmp_path / "mfu.csv", tmp_path / "mfu.json"
    table.write_text(
        "job,mfu,device,compute_shares,peak_dtype\n"
        "a,0.6,NVIDIA B200,fp8:0.7 bf16:0.3,bf16\nb,0.4,,,\nc,0.4,,fp8:0.7 bf16:0.3,mixed\n"
    )
    shares = '{"fp8": 0.7, "bf16": 0.3}'
    objects.write_text(
        f'[{{"job": "a", "mfu": 0.6, "device": "NVIDIA B200", "compute_shares": {shares},'
        ' "peak_dtype": "bf16"},'
        ' {"job": "b", "mfu": 0.4, "compute_shares": null},'
        ' {"job": "c", "mfu": 0.4, "compute_shares": "fp8:0.7 bf16:0.3", "peak_dtype": "mixed"}]'
    )
    applications = read_applications(table)
    assert read_applications(objects) == applications
    assert applications["a"].facts == JobFacts(
        device="NVIDIA B200", compute_shares={"fp8": 0.7, "bf16": 0.3}, peak_dtype="bf16"
    )
    fleet = FleetSamples(start=0, end=3600, step_s=30, tensor_mhz=1000)
    for step in range(120):
        fleet.add("a", Device("node", "0"), 30.0 * step, 0.39, 1000)
    (best, *_) = fleet_report(fleet, applications).jobs[0].candidates
    assert best.name == "0.7 fp8, 0.3 bf16 work against the bf16 peak"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ('"fp8:0.7 bf16:0.2"', "job a: compute_shares=.* must be shares from 0 to 1 that add up to 1"),
        ('"int3:0.7 bf16:0.3"', "job a: compute_shares has the unknown type int3"),
        ('"fp8 bf16"', "must be a type and its share each, such as fp8:0.7 bf16:0.3"),
        ('"fp8:0.7 fp8:0.3"', "compute_shares has fp8 twice"),
        ('"fp8:x bf16:0.3"', "compute_shares of fp8='x' must be a number"),
        ('"fp8: bf16:0.3"', "compute_shares has no share of fp8"),
        ('{"fp8": [1]}', r"compute_shares of fp8='\[1\]' must be a number"),
        ("0.5", "must be a type and its share each"),
    ],
)
def test_shares_that_are_none_are_refused(tmp_path: Path, fields: str, message: str) -> None:
    path = tmp_path / "mfu.json"
    path.write_text(f'[{{"job": "a", "mfu": 0.4, "compute_shares": {fields}}}]')
    with pytest.raises(ValueError, match=message):
        read_applications(path)
