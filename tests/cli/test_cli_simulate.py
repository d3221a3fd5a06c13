"""`pyps simulate` from a cluster file: what it prints, what it writes, what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from pyps.cli.simulate import app
from pyps.errors import Infeasible, InputError
from pyps.formats import Device, ModelInfo, Pace, Plan, Point, Profile, read_cluster, read_profile, write_json
from pyps.native.values import OUTER
from pyps.profiler.curve import fit_of, select_fit
from pyps.simulate import scenario_of, simulate
from pyps.solver.plan import make_plan
from pyps.store.policies import Policy

CLUSTER = """
[job]
global_batch = 96
[[worker]]
name = "fast"
count = 2
profile = "fast.json"
[[worker]]
name = "slow"
profile = "slow.json"
bandwidth = 1e8
latency = 0.001
"""
SIMULATION = """
[simulation]
server_bandwidth = 1e9
servers = 2
jitter = { sigma = 0.1 }
[[simulation.host]]
name = "rack"
bandwidth = 5e8
workers = ["fast"]
[[simulation.fault]]
worker = "fast"
at = 0.2
kind = "slow"
seconds = 0.5
added = 0.05
[[simulation.fault]]
worker = "fast-1"
at = 0.5
kind = "kill"
seconds = 0.3
"""


def profile(fixed: float, each: float) -> dict[str, object]:
    return {
        "schema": "pyps.profile/1",
        "device": {"name": "made up"},
        "model": {"name": "mlp", "parameters": 250_000},
        "points": [{"batch": b, "seconds": fixed + each * b} for b in (8, 16, 32, 64, 128)],
        "max_batch": 128,
    }


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    (tmp_path / "fast.json").write_text(json.dumps(profile(0.01, 0.001)))
    (tmp_path / "slow.json").write_text(json.dumps(profile(0.02, 0.004)))
    (tmp_path / "cluster.toml").write_text(CLUSTER + SIMULATION)
    return tmp_path / "cluster.toml"


def ask(*arguments: object) -> str:
    done = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_plan_of_another_cluster_file_is_said(tmp_path: Path) -> None:
    device = Profile(
        device=Device(name="d"),
        model=ModelInfo(name="m", parameters=1000),
        points=[Point(batch=b, seconds=0.01 + 0.001 * b) for b in (1, 8, 64)],
    )
    write_json(tmp_path / "p.json", device)
    cluster = tmp_path / "cluster.toml"
    text = '[job]\nglobal_batch = 32\n[[worker]]\nname = "a"\ncount = 2\nprofile = "p.json"\n'
    cluster.write_text(text)
    read, fit = read_cluster(cluster), select_fit(device.points)
    write_json(tmp_path / "plan.json", make_plan(read, [msgspec.structs.replace(device, fit=fit)]))
    assert scenario_of(cluster, plan_path=tmp_path / "plan.json").differences == ()
    cluster.write_text(text.replace("32", "48") + "batch_multiple = 8\nmax_batch = 40\n")
    slower = [Point(batch=p.batch, seconds=2 * p.seconds) for p in device.points]  # type: ignore[operator]
    write_json(tmp_path / "p.json", msgspec.structs.replace(device, points=slower))
    found = scenario_of(cluster, plan_path=tmp_path / "plan.json").differences
    fields = [line.partition(":")[0] for line in found]
    assert fields == [
        "job.global_batch",
        *(f"worker[0].{key}" for key in ("profile", "max_batch", "batch_multiple")),
    ]


def test_a_scenario_is_what_the_file_says(cluster: Path) -> None:
    scenario = scenario_of(cluster)
    assert [w.name for w in scenario.workers] == ["fast-0", "fast-1", "slow"]
    assert scenario.global_batch == 96
    assert scenario.batches[0] > scenario.batches[2], "the planner's batches"
    assert scenario_of(cluster, even=True).batches == (32, 32, 32)
    assert scenario.server_bandwidth == 2e9
    assert scenario.up_bytes == scenario.down_bytes == 4 * 250_000
    assert [w.host for w in scenario.workers] == ["rack", "rack", ""]
    assert (scenario.workers[2].bandwidth, scenario.workers[2].latency) == (1e8, 0.001)
    assert [len(w.slowdowns) for w in scenario.workers] == [1, 1, 0]
    assert [(m.rank, m.kind) for m in scenario.faults] == [(1, "kill")]
    assert scenario.workers[0].cost(100) == pytest.approx(0.11)


def test_an_even_split_keeps_to_the_batch_multiples(cluster: Path) -> None:
    text, named = CLUSTER.replace("= 96", "= 104"), "\n[[worker]]\nname"
    cluster.write_text(text.replace(named, "\n[[worker]]\nbatch_multiple = 8\nname"))
    assert scenario_of(cluster, even=True).batches == (40, 32, 32)
    cluster.write_text(text.replace(named, "\n[[worker]]\nbatch_multiple = 20\nname", 1))
    *fast, slow = scenario_of(cluster, even=True).batches
    assert (max(fast), sum(fast) % 20, sum(fast) + slow) == (40, 0, 104)
    cluster.write_text(CLUSTER.replace(named, "\n[[worker]]\nbatch_multiple = 48\nname"))
    with pytest.raises(Infeasible, match=r"even split in batch multiples.*sum to 144"):
        scenario_of(cluster, even=True)


def test_even_batches_that_do_not_fit_are_said(cluster: Path) -> None:
    """Even batches are simulated all the same: it shows what the plan wins."""
    limited = cluster.with_name("slow.json")
    known = read_profile(limited)
    for most, said in ((31, "slow has 32, of at most 31"), (32, "")):
        write_json(limited, msgspec.structs.replace(known, max_batch=most))
        assert "; ".join(scenario_of(cluster, even=True).too_large) == said
        assert scenario_of(cluster).too_large == ()
        done = CliRunner().invoke(app, [str(cluster), "--even", "--policies", "bsp", "--iterations", "2"])
        assert done.exit_code == 0
        assert ("warning: --even: more samples than fit: slow has 32" in done.stderr) == bool(said)


def test_two_outputs_are_two_files(cluster: Path) -> None:
    given = [str(cluster), "--trace", "a.png", "--plot", "./a.png"]
    with pytest.raises(InputError, match=r"--plot: found a\.png, the file of --trace"):
        CliRunner().invoke(app, given, catch_exceptions=False)


def test_each_worker_has_as_many_steps_under_way_as_in_the_plan(cluster: Path) -> None:
    cluster.write_text(CLUSTER + '[run]\npolicy = "asp"\ndepth = "auto"\n')
    fits = {name: read_profile(cluster.with_name(f"{name}.json")) for name in ("fast", "slow")}
    profiles = [msgspec.structs.replace(one, fit=fit_of(one)) for one in fits.values()]
    plan = make_plan(read_cluster(cluster), profiles, Pace("free"))
    assert plan.run is not None
    planned = [plan.mode_of(worker).depth for worker in plan.workers]
    assert planned == [1, 1, 2], "two have no link"
    assert [worker.depth for worker in scenario_of(cluster).workers] == planned


def test_averaged_moments_are_bytes_of_each_worker(cluster: Path) -> None:
    """Two fp32 values more of each parameter, each way."""
    cluster.write_text(CLUSTER + "[run]\nlocal_steps = 4\naverage_moments = 2\n")
    assert [(w.up_share, w.down_share) for w in scenario_of(cluster).workers] == [(3.0, 3.0)] * 3


def planned_run(cluster: Path, run: str) -> tuple[Path, Plan]:
    """A plan in the mode of `run`, which the cluster file then does not repeat."""
    links = "bandwidth = 2e7\nlatency = 0.01\n"
    text = CLUSTER.replace('profile = "fast.json"\n', f'profile = "fast.json"\n{links}')
    cluster.write_text(text + run)
    fits = {name: read_profile(cluster.with_name(f"{name}.json")) for name in ("fast", "slow")}
    profiles = [msgspec.structs.replace(one, fit=fit_of(one)) for one in fits.values()]
    plan = make_plan(read_cluster(cluster), profiles, Policy.known["hps"]().pace)
    write_json(cluster.with_name("plan.json"), plan)
    cluster.write_text(text)
    return cluster.with_name("plan.json"), plan


@pytest.mark.parametrize(
    "run",
    ["", "depth = 2\n", 'codec = "int8"\npull_codec = "bf16"\n'],
    ids=["serial", "deep", "bits"],
)
def test_a_plan_is_simulated_in_its_own_mode(cluster: Path, run: str) -> None:
    """Policy, depth, bits and sizes are the plan's, whatever the cluster file says now."""
    path, plan = planned_run(cluster, f'[run]\npolicy = "hps"\n{run}')
    (found,) = json.loads(ask(cluster, "--plan", path, "--iterations", "60", "--json"))
    assert found["policy"] == "hps"
    assert found["iteration_seconds"] == pytest.approx(plan.iteration_seconds, rel=0.05)
    most = {worker.name: worker.most_at_once for worker in plan.workers}
    assert all(w.micro_batch == most[w.name] for w in scenario_of(cluster, plan_path=path).workers)


LINK = {"via": "gloo", "latency_seconds": 0.001, "bytes_per_second": 1e8}
SHARED = 'shares = ["switch"]\n[[shared]]\nname = "switch"\nbandwidth = 1e8\nlatency = 0.002\n'


@pytest.mark.parametrize("link", ["", SHARED])
def test_transfers_take_as_long_as_in_the_plan(tmp_path: Path, link: str) -> None:
    (tmp_path / "one.json").write_text(json.dumps(profile(0.01, 0.001) | {"link": LINK}))
    text = '[job]\nglobal_batch = 96\n[[worker]]\nname = "w"\ncount = 3\nprofile = "one.json"\n'
    (tmp_path / "cluster.toml").write_text(text + link)
    cluster = read_cluster(tmp_path / "cluster.toml")
    one = read_profile(tmp_path / "one.json")
    planned = make_plan(cluster, [msgspec.structs.replace(one, fit=fit_of(one))])
    found = simulate(scenario_of(tmp_path / "cluster.toml"), "bsp", iterations=20)
    assert max(worker.link_seconds for worker in planned.workers) > 0.02
    assert found.iteration_seconds == pytest.approx(planned.iteration_seconds, rel=1e-6)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ('[sync]\nkind = "ring"\nbandwidth = 1e8\n', "sync.kind: found 'ring'; expected bandwidths instead"),
        (
            'shares = ["a", "b"]\n'
            + "".join(f'[[shared]]\nname = "{name}"\nbandwidth = 1e8\n' for name in "ab"),
            r"slow\.shares: found a, b; expected one link, or a",
        ),
    ],
)
def test_links_that_cannot_be_simulated_are_refused(cluster: Path, more: str, message: str) -> None:
    cluster.write_text(CLUSTER + more)
    with pytest.raises(InputError, match=message):
        scenario_of(cluster)


def test_all_policies_as_json(cluster: Path) -> None:
    results = json.loads(ask(cluster, "--iterations", 20, "--learn", "logistic", "--json"))
    assert [r["policy"] for r in results] == list(Policy.known)
    for result in results:
        assert result["samples"] == 20 * 96
        assert result["loss"] < 1.5
        assert sum(result["staleness"].values()) == sum(r["pushes"] for r in result["ranks"])


def test_the_table_and_the_pictures(cluster: Path, tmp_path: Path) -> None:
    arguments = ["--policies", "bsp saps:threshold=fixed,bound=4", "--iterations", 10, "--show"]
    text = ask(cluster, *arguments, "--trace", tmp_path / "t.json", "--plot", tmp_path / "p.png")
    assert "3 workers, global batch 96" in text
    assert "saps:threshold=fixed" in text
    assert "fast-0 <" in text
    assert "#" in text
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {e["pid"] for e in events} == {1, 2}
    assert {e["name"] for e in events if e["ph"] == "X"} >= {"pull", "compute", "push"}
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_late_workers_abort_between_micro_batches(cluster: Path) -> None:
    policy = "saps:threshold=fixed,bound=1,abort=true"
    common = ["--even", "--policies", policy, "--iterations", 20, "--json"]
    whole, parts = (json.loads(ask(cluster, *common, *more))[0] for more in ([], ["--micro-batch", 8]))
    assert whole["aborted"] == 0
    assert parts["aborted"] > 0
    assert max(map(int, parts["staleness"])) <= 1


def test_a_target_stops_and_is_said(cluster: Path) -> None:
    text = ask(
        cluster, "--policies", "asp", "--learn", "logistic", "--lr", 0.5, "--target-loss", 1.0, "--seed", 3
    )
    assert "to target" in text
    assert "never" not in text


@pytest.mark.parametrize("option", ["--lr", "--inner-lr", "--target-loss", "--measure-every"])
def test_what_only_learning_has_is_refused_without_it(cluster: Path, option: str) -> None:
    with pytest.raises(InputError, match=f"{option}: found 2; expected --learn"):
        CliRunner().invoke(app, [str(cluster), option, "2"], catch_exceptions=False)


def test_errors_of_a_simulation_name_its_file(cluster: Path) -> None:
    run = "[run]\nlocal_steps = 4\nlocal_batch = 4\n"
    cluster.write_text(CLUSTER.replace("count = 2", "count = 2\nbatch_multiple = 8") + run)
    with pytest.raises(InputError, match=r"cluster\.toml: run\.local_batch: found 4"):
        CliRunner().invoke(app, [str(cluster)], catch_exceptions=False)


def test_the_command_is_there(cluster: Path) -> None:
    pyps = str(Path(sys.executable).parent / "pyps")
    command = [pyps, "simulate", str(cluster), "--policies", "unknown"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "pyps simulate: --policies: found 'unknown'; expected one of bsp, asp" in done.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[simulation.host]]\nname="r"\nbandwidth=1.0\nworkers=["x"]', r"host\[0\].workers: found 'x'"),
        ('[[simulation.fault]]\nworker="x"\nat=0\nkind="stop"', r"fault\[0\].worker: found 'x'"),
        ('[[simulation.fault]]\nworker="slow"\nat=0\nkind="explode"', "explode"),
        ("[simulation]\nserver_bandwidth = 0", "server_bandwidth"),
        ("[simulation]\nspeed = 1", "speed"),
        ("[simulation]\njitter = { drift = 1.5 }", "drift"),
        (
            '[[simulation.host]]\nname="a"\nbandwidth=1.0\nworkers=["fast"]\n'
            '[[simulation.host]]\nname="b"\nbandwidth=1.0\nworkers=["fast-1"]',
            "second time",
        ),
        (
            '[[simulation.host]]\nname="a"\nbandwidth=1.0\nworkers=["fast"]\n'
            '[[simulation.host]]\nname="a"\nbandwidth=2.0\nworkers=["slow"]',
            r"host\[1\].name: found 'a' a second time",
        ),
        (
            'shares = ["a"]\n[[shared]]\nname="a"\nbandwidth=1.0\n'
            '[[simulation.host]]\nname="a"\nbandwidth=2.0\nworkers=["slow"]',
            r"host\[0\].name: found 'a' a second time",
        ),
    ],
)
def test_bad_simulations_are_refused(cluster: Path, text: str, message: str) -> None:
    cluster.write_text(CLUSTER + text)
    with pytest.raises(InputError, match=message):
        read_cluster(cluster)


def test_a_host_that_prepares_samples_may_have_the_name_of_a_link(cluster: Path) -> None:
    one = 'shares = ["a"]\n[[shared]]\nname="a"\nsamples_per_second=9.0\n'
    cluster.write_text(CLUSTER + one + '[[simulation.host]]\nname="a"\nbandwidth=2.0\nworkers=["slow"]')
    assert read_cluster(cluster).simulation.host[0].name == "a"


def test_a_pipeline_leaves_out_policies_that_refuse_it(cluster: Path) -> None:
    done = CliRunner().invoke(app, [str(cluster), "--iterations", "5", "--depth", "auto", "--json"])
    named = [r["policy"] for r in json.loads(done.stdout)]
    assert named == [name for name, kind in Policy.known.items() if kind().needs.allows_pipeline]


def test_rebalancing_shows_each_change_and_what_it_gained(cluster: Path) -> None:
    slowed = '[[simulation.fault]]\nworker = "fast-0"\nat = 2.0\nkind = "slow"\nfactor = 2.0\n'
    cluster.write_text(CLUSTER + slowed)
    options = (cluster, "--policies", "bsp", "--iterations", 200, "--rebalance")
    said = ask(*options)
    assert "bsp, rebalanced" in said
    assert "of the split" in said
    assert "rank 0 slowed by 2.0x" in said
    alone, rebalanced = json.loads(ask(*options, "--json"))
    assert alone["replans"] is None
    first = rebalanced["replans"][0]
    assert first["at"] > 2.0
    assert first["after"][0] < first["before"][0]
    assert sum(first["after"]) == 96
    assert rebalanced["seconds"] < alone["seconds"]


def test_churn_is_simulated_and_what_it_takes_is_shown(cluster: Path) -> None:
    churn = "[simulation.churn]\nevery = 20.0\naway = 2.0\nuntil = 30.0\ngone = 0.34\nnoticed = 0.1\n"
    cluster.write_text(CLUSTER + churn)
    scenario = scenario_of(cluster)
    assert scenario.noticed == 0.1
    assert {f.kind for f in scenario.faults} == {"kill", "leave"}
    command = [str(cluster), "--policies", "asp", "--seconds", "10"]
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 0, shown.output
    assert "useful" in shown.output
    (result,) = json.loads(CliRunner().invoke(app, [*command, "--json"]).output)
    assert result["seconds"] == pytest.approx(10.0, abs=1.0)
    assert 0.0 < result["useful_share"] < 1.0
    assert result["repeated"] == 0


def test_the_help_says_the_rate_of_local_steps() -> None:
    help_of = {option.name: getattr(option, "help", "") for option in typer.main.get_command(app).params}
    assert f"with local steps, {OUTER.lr}." in help_of["lr"]


STOPPED = '[[simulation.fault]]\nworker = "slow"\nat = 1.0\nkind = "stop"\nseconds = 20.0\n'


def test_the_round_timeout_is_the_plans(cluster: Path) -> None:
    """A worker that stands still for longer is fenced, as in the run; an option says otherwise."""
    cluster.write_text(f'{CLUSTER}[run]\npolicy = "bsp"\nround_timeout = 3.0\n{STOPPED}')
    options = (cluster, "--iterations", 40, "--json")
    (planned,), (patient,) = (json.loads(ask(*options, *more)) for more in ([], ["--round-timeout", 60]))
    assert planned["fenced"] > 0 == patient["fenced"]
    assert simulate(scenario_of(cluster), "bsp", iterations=40).fenced == planned["fenced"]


def test_equal_batches_are_simulated_as_they_are_planned(cluster: Path) -> None:
    """In micro-batches, where memory holds no more."""
    small = 'profile = "slow.json"\nmax_batch = 8\nmax_accumulation = 8\n'
    cluster.write_text(CLUSTER.replace('profile = "slow.json"\n', small))
    fits = {name: read_profile(cluster.with_name(f"{name}.json")) for name in ("fast", "slow")}
    profiles = [msgspec.structs.replace(one, fit=fit_of(one)) for one in fits.values()]
    even = make_plan(read_cluster(cluster), profiles).even_split.seconds
    found = simulate(scenario_of(cluster, even=True), "bsp", iterations=20)
    assert found.iteration_seconds == pytest.approx(even, rel=1e-6)


def test_a_device_that_is_fast_at_multiples_is_simulated_as_planned(cluster: Path) -> None:
    """Sizes off the multiples say nothing of batches that are multiples."""
    sizes = [8, 16, 32, 40, 48, 64, 80, 96, 129, 160, 192, 200, 256]
    points = [{"batch": b, "seconds": (0.01 + 1e-3 * b) * (1.3 if b % 8 else 1.0)} for b in sizes]
    device = profile(0.01, 0.001) | {"points": points, "max_batch": 256}
    cluster.with_name("fast.json").write_text(json.dumps(device))
    text = CLUSTER.replace('profile = "fast.json"\n', 'profile = "fast.json"\nbatch_multiple = 8\n')
    cluster.write_text(text.replace("96", "280"))
    fits = {name: read_profile(cluster.with_name(f"{name}.json")) for name in ("fast", "slow")}
    profiles = [msgspec.structs.replace(one, fit=fit_of(one)) for one in fits.values()]
    plan = make_plan(read_cluster(cluster), profiles)
    write_json(cluster.with_name("plan.json"), plan)
    scenario = scenario_of(cluster, plan_path=cluster.with_name("plan.json"))
    assert scenario.differences == ()
    found = simulate(scenario, "bsp", iterations=20)
    assert found.iteration_seconds == pytest.approx(plan.iteration_seconds, rel=1e-6)


def test_a_profile_that_cannot_be_fitted_is_named(cluster: Path) -> None:
    path = cluster.with_name("slow.json")
    path.write_text(json.dumps(profile(0.02, 0.004) | {"points": [{"batch": 8, "seconds": 0.1}]}))
    with pytest.raises(InputError, match=r"slow\.json: points: found 1 distinct batch"):
        scenario_of(cluster)
