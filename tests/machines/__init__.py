"""Several machines on this one, for tests of what happens between them.

Each machine is a set of Linux namespaces: a network of its own (``eth0`` with 10.77.0.1, 10.77.0.2,
... at a bridge that lives in a network namespace as well, and ``lo``), a host name (``node0``,
``node1``, ...), a table of processes with its own ``/proc``, its own ``/etc/hosts`` and its own
``/dev/shm``. The file system is otherwise that of the tests. Nothing of it touches the interfaces
of the real machine, and all of it ends with the test, however that ends. Two machines are up in a
fifth of a second. They need root, `ip` and `unshare`::

    from tests.machines import Machines, needs_machines

    @needs_machines
    def test_cut(tmp_path):
        with Machines(2, tmp_path, hosts="debian") as machines:
            runs = [m.start([sys.executable, "job.py", machines[0].address]) for m in machines]
            machines[1].cut()                       # the cable is pulled
            machines[1].mend()
            machines[1].signal_all(signal.SIGSTOP)  # the machine hangs; SIGCONT wakes it
            machines[1].power_off()                 # no process of it says goodbye
            code, output = runs[0].wait(60)

`Machines`, `Machine` and `Run` say what else there is.
"""

from tests.machines.machine import Machine, Machines, Run, needs_machines

__all__ = ["Machine", "Machines", "Run", "needs_machines"]
