"""The launcher with a stand-in for msrun: arguments, quoting, logs and exit codes."""

import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LAUNCHER = ROOT / "scripts" / "msrun_launcher.sh"

# Does what the launcher relies on: one process a rank with RANK_ID, its log, 1 if any of them does not return 0, and an
# end on SIGINT. It leaves its own arguments in options.txt.
FAKE_MSRUN = """#!{python}
import os, signal, subprocess, sys
options = dict(a[2:].split("=", 1) for a in sys.argv[1:] if a.startswith("--") and "=" in a)
words = sys.argv[1:]
while words and words[0].startswith("--"):
    words.pop(0)
with open("options.txt", "w") as file:
    file.write("\\n".join(sys.argv[1 : len(sys.argv) - len(words)]))
local = int(options["local_worker_num"])
first = int(options.get("node_rank", 0)) * local
workers = []
for rank in range(first, first + local):
    log = open(os.path.join(options["log_dir"], f"worker_{{rank}}.log"), "w")
    env = os.environ | {{"RANK_ID": str(rank), "MS_ROLE": "MS_WORKER"}}
    workers.append(subprocess.Popen(["python", *words], env=env, stdout=log, stderr=log, start_new_session=True))

def stop(number, frame):
    for worker in workers:
        os.killpg(worker.pid, signal.SIGKILL)
    sys.exit(0)

signal.signal(signal.SIGINT, stop)
if os.environ.get("FAKE_MSRUN_BREAKS"):
    print("scheduler is unreachable")
    sys.exit(1)
if options["join"] == "True":
    sys.exit(any([worker.wait() for worker in workers]))
"""


@pytest.fixture
def launch(tmp_path):
    """Runs the launcher in tmp_path with python and the fake msrun first on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "msrun").write_text(FAKE_MSRUN.format(python=sys.executable))
    (folder / "msrun").chmod(0o755)
    (folder / "python").symlink_to(sys.executable)

    def run(*arguments, **environment):
        env = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"} | environment
        return subprocess.run(
            ["bash", str(LAUNCHER), *arguments], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
        )

    return run


@pytest.fixture
def script(tmp_path):
    """Writes a program into tmp_path and returns its name."""

    def write(text, name="job.py"):
        (tmp_path / name).write_text(text)
        return name

    return write


def options(tmp_path):
    return (tmp_path / "options.txt").read_text().splitlines()


@pytest.mark.parametrize("workers", ["1", "2"])
def test_quotes_in_the_command_survive_and_nothing_is_expanded(launch, script, workers):
    name = script("import sys; print(sys.argv[1:])")
    done = launch(f'python {name} --predict_data "a b  c \\"d\\" $HOME `ls` *" \'x;y\' ""', workers)
    assert done.returncode == 0, done.stderr
    assert str(["--predict_data", 'a b  c "d" $HOME `ls` *', "x;y", ""]) in done.stdout


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_bare_script_is_run_by_python_in_the_folder_of_the_caller(launch, script, tmp_path, workers):
    name = script("import os, sys; print(os.getcwd()); print(os.environ['PYTHONPATH'].split(':')[0])")
    done = launch(name, workers)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == [str(tmp_path), str(ROOT)]


def test_one_worker_is_plain_python_with_its_own_exit_code(launch, script, tmp_path):
    name = script("import os, sys; print(os.environ.get('RANK_ID')); sys.exit(3)")
    done = launch(f"python {name}", "1")
    assert (done.returncode, done.stdout) == (3, "None\n")
    assert not (tmp_path / "options.txt").exists()


def test_one_argument_starts_eight_workers_and_joins_them(launch, script, tmp_path):
    done = launch(script("import os; print('rank', os.environ['RANK_ID'])"))
    assert done.returncode == 0, done.stderr
    given = options(tmp_path)
    assert {"--worker_num=8", "--local_worker_num=8", "--join=True", "--cluster_time_out=7200"} <= set(given)
    assert "--log_dir=output/msrun_log" in given
    assert (tmp_path / "output/msrun_log/worker_7.log").read_text() == "rank 7\n"
    assert "rank 0" in done.stdout
    assert "rank 7" not in done.stdout


def test_six_arguments_set_port_logs_join_and_timeout(launch, script, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    done = launch(script("pass"), "2", port, "my logs", "true", "77", MF_LOG_SUFFIX="x")
    assert done.returncode == 0, done.stderr
    given = set(options(tmp_path))
    assert {f"--master_port={port}", "--log_dir=my logs_x", "--join=True", "--cluster_time_out=77"} <= given
    assert not any(option.startswith(("--node_rank", "--master_addr")) for option in given)


def test_nine_arguments_start_the_ranks_of_this_node(launch, script, tmp_path):
    name = script("import os; print('rank', os.environ['RANK_ID'])")
    done = launch(name, "4", "2", "10.0.0.1", "9123", "1", "logs", "True", "60")
    assert done.returncode == 0, done.stderr
    assert {"--master_addr=10.0.0.1", "--node_rank=1", "--local_worker_num=2"} <= set(options(tmp_path))
    assert (tmp_path / "logs/worker_3.log").read_text() == "rank 3\n"
    assert "rank 2" in done.stdout


def test_leading_zeros_do_not_make_a_number_octal(launch, script, tmp_path):
    done = launch(script("pass"), "08", "02", "10.0.0.1", "09123", "03", "logs", "True", "0060")
    assert done.returncode == 0, done.stderr
    given = {"--worker_num=8", "--local_worker_num=2", "--node_rank=3", "--master_port=9123", "--cluster_time_out=60"}
    assert given <= set(options(tmp_path))
    assert (tmp_path / "logs/worker_7.log").exists()


def test_a_negative_timeout_passes_as_it_is(launch, script, tmp_path):
    done = launch(script("pass"), "2", "auto", "logs", "True", "-1")
    assert done.returncode == 0, done.stderr
    assert "--cluster_time_out=-1" in options(tmp_path)


def test_nine_arguments_with_all_workers_here_are_a_single_node(launch, script, tmp_path):
    done = launch(script("pass"), "2", "2", "10.0.0.1", "", "0", "logs", "True", "60")
    assert done.returncode == 0, done.stderr
    assert not any(option.startswith("--master_addr") for option in options(tmp_path))


def test_the_failing_worker_is_named_with_the_end_of_its_log_and_gives_the_exit_code(launch, script):
    name = script("import os, sys\nif os.environ['RANK_ID'] == '1':\n    print('disk is gone'); sys.exit(7)")
    done = launch(name, "2")
    assert done.returncode == 7
    assert "worker 1 failed with exit code 7" in done.stderr
    assert "disk is gone" in done.stderr


def test_a_worker_ended_by_a_signal_gives_the_code_of_a_shell(launch, script):
    name = script("import os, signal\nif os.environ['RANK_ID'] == '1': os.kill(os.getpid(), signal.SIGKILL)")
    done = launch(name, "2")
    assert done.returncode == 137
    assert "worker 1 failed with exit code 137" in done.stderr


def test_a_worker_that_failed_because_of_another_is_not_taken_for_the_cause(launch, script):
    path = script(
        "import os, sys\n"
        "rank = int(os.environ['RANK_ID'])\n"
        "print(f'error: rank 1 failed: bad, says {rank}', file=sys.stderr)\n"
        "sys.exit(5 if rank != 1 else 9)"
    )
    result = launch(f"python {path}", "3")
    assert result.returncode == 9
    assert "worker 1 failed with exit code 9" in result.stderr and "worker 0 failed" not in result.stderr


def test_a_worker_that_was_left_alone_ends_with_5_and_the_log_of_the_cause_is_shown(launch, script):
    path = script(
        "import os, sys\n"
        "rank = int(os.environ['RANK_ID'])\n"
        "print('the disk is gone' if rank == 1 else 'error: rank 1 failed: gone', file=sys.stderr, flush=True)\n"
        "sys.exit(0 if rank == 1 else 5)"
    )
    result = launch(f"python {path}", "2")
    assert result.returncode == 5
    assert "worker 0 failed because another one did" in result.stderr
    assert "worker 1 was the one that failed" in result.stderr and "the disk is gone" in result.stderr


def test_a_log_folder_that_cannot_be_used_is_refused(launch, script, tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "worker_0.log").mkdir()  # nobody, not even root, can write to it
    script("")
    result = launch("job.py", "2", "auto", "logs", "True", "60")
    assert result.returncode == 1 and "error: LOG_DIR 'logs' is not writable" in result.stderr
    (tmp_path / "file").write_text("")
    result = launch("job.py", "2", "auto", "file/logs", "True", "60")
    assert result.returncode == 1 and "LOG_DIR 'file/logs' cannot be made" in result.stderr


def test_error_records_on_one_worker_end_the_job_with_3_and_leave_the_others_alone(launch, script):
    name = script("import os, sys; print('done'); sys.exit(3 if os.environ['RANK_ID'] == '1' else 0)")
    done = launch(name, "2")
    assert done.returncode == 3
    assert "done" in done.stdout
    assert done.stderr == ""


def test_a_failure_of_msrun_itself_is_shown(launch, script):
    done = launch(script("pass"), "2", FAKE_MSRUN_BREAKS="1")
    assert done.returncode == 1
    assert "scheduler is unreachable" in done.stderr


def test_the_whole_log_of_worker_0_is_shown_and_none_of_an_earlier_job(launch, script, tmp_path):
    logs = tmp_path / "output/msrun_log"
    logs.mkdir(parents=True)
    (logs / "worker_0.log").write_text("earlier job\n")
    done = launch(script("for i in range(500): print('line', i)"), "2")
    assert done.stdout.splitlines()[1:] == [f"line {i}" for i in range(500)]


def test_join_false_returns_at_once_and_says_where_the_logs_are(launch, script, tmp_path):
    os.mkfifo(tmp_path / "gate")
    name = script("import os\nif os.environ['RANK_ID'] == '0': open('gate').read()\nprint('late')")
    done = launch(name, "2", "auto", "logs", "False", "60")
    assert done.returncode == 0, done.stderr
    assert "logs/worker_<rank>.log" in done.stdout
    assert "--join=False" in options(tmp_path)
    with open(tmp_path / "gate", "w") as gate:  # worker 0 is still there: it opens the other end
        gate.write("go")


def test_an_interrupt_stops_the_workers(launch, script, tmp_path):
    os.mkfifo(tmp_path / "alive")
    os.mkfifo(tmp_path / "never")
    name = script("alive = open('alive', 'w'); alive.write('x'); alive.flush(); open('never').read()")
    env = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    job = subprocess.Popen(["bash", str(LAUNCHER), name, "2"], cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True)
    with open(tmp_path / "alive") as alive:
        assert alive.read(1)
        job.send_signal(signal.SIGTERM)
        _, errors = job.communicate(timeout=60)
        alive.read()  # ends once no worker holds the other end
    assert job.returncode == 143
    assert "interrupted, the workers are stopped" in errors


STOPPABLE = """
import os, signal, sys
def stop(number, frame):
    print("stopping", flush=True)
    sys.exit(4)
signal.signal(signal.SIGTERM, stop)
alive = open('alive', 'w')
alive.write('x')
alive.flush()
open('never').read()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_workers_that_stop_by_themselves_are_not_killed_and_their_code_is_the_jobs(launch, script, tmp_path, number):
    for name in ("alive", "never"):
        os.mkfifo(tmp_path / name)
    env = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    job = subprocess.Popen(
        ["bash", str(LAUNCHER), script(STOPPABLE), "2"],
        cwd=tmp_path,
        env=env,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that runs tests in the background ignores SIGINT, and so would all that is started from it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    with open(tmp_path / "alive") as alive:
        assert alive.read(2) == "xx"
        job.send_signal(number)
        _, errors = job.communicate(timeout=60)
        alive.read()
    assert job.returncode == 4, errors
    for rank in range(2):
        assert (tmp_path / f"output/msrun_log/worker_{rank}.log").read_text() == "stopping\n"


@pytest.mark.parametrize(("codes", "code"), [((3, 0), 3), ((4, 4), 4), ((4, 3), 4), ((4, 7), 7)])
def test_codes_of_orderly_ends_come_through(launch, script, codes, code):
    name = script(f"import os, sys; sys.exit({codes}[int(os.environ['RANK_ID'])])")
    assert launch(name, "2").returncode == code


def test_a_port_in_use_is_refused(launch, script):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = launch(script("pass"), "2", port, "logs", "True", "60")
    assert done.returncode == 1
    assert f"MASTER_PORT {port} is in use" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "usage:"),
        (["job.py", "2", "8118"], "expected 1, 2, 6 or 9 arguments, got 3"),
        (["job.py", "two"], "WORKER_NUM must be an integer"),
        (["job.py", "0"], "WORKER_NUM must be an integer from 1"),
        (["job.py", "2", "80", "logs", "True", "60"], "MASTER_PORT must be an integer from 1024 to 65535, not '80'"),
        (["job.py", "2", "auto", "logs", "maybe", "60"], "JOIN must be True or False, not 'maybe'"),
        (["job.py", "2", "auto", "logs", "True", "soon"], "CLUSTER_TIME_OUT must be an integer"),
        (["job.py", "2", "4", "h", "9000", "0", "logs", "True", "60"], "LOCAL_WORKER must be an integer from 1 to 2"),
        (["job.py", "4", "2", "h", "9000", "2", "logs", "True", "60"], "does not fit into WORKER_NUM 4"),
        (["job.py", "4", "2", "h", "auto", "0", "logs", "True", "60"], "needs a MASTER_PORT"),
        (["nope.py"], "'nope.py', which is not a file"),
        (["A=1 python job.py"], "'A=1', which is neither a program nor a .py file"),
        (["python 'job.py"], "No closing quotation"),
        (["  "], "CMD is empty"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(launch, script, tmp_path, arguments, said):
    script("pass")
    done = launch(*arguments)
    assert done.returncode == 1
    assert said in done.stderr
    assert not (tmp_path / "options.txt").exists()


def test_scripts_are_executable():
    for name in ("scripts/msrun_launcher.sh", "scripts/test.sh", "scripts/quickstart.sh", ".ci/run"):
        assert (ROOT / name).stat().st_mode & stat.S_IXUSR, name
