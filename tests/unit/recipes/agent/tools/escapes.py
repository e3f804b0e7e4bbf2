"""Attempts of a program to get out of its sandbox, by name.

Each is the body of a function of `host`, what an attacker knows of this machine, that returns whether it got out.
Every attempt must end with an exception of the kernel's or of Python's, or with a false value.
"""

from __future__ import annotations

from typing import Final

PROLOGUE: Final = """
import ctypes, json, os, resource, signal, socket, struct, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def syscall(number, *args):
    if libc.syscall(number, *args) == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return True
def call(name, *args):
    if getattr(libc, name)(*args) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return True
def read(path):
    with open(path, "rb") as file:
        return bool(file.read(64))
def write(path, text=b"x"):
    with open(path, "wb") as file:
        file.write(text)
    return True
X86 = os.uname().machine == "x86_64"
SOCKET, SOCKETPAIR = (41, 53) if X86 else (198, 199)
class Reached(Exception):
    pass  # the kernel was asked, and refused by itself
def any_kind(family):
    for kind in (1, 2, 3, 5):
        for protocol in (0, 1, 2, 3):
            try:
                socket.socket(family, kind, protocol)
                return True
            except OSError as error:
                if error.errno != 97:
                    raise Reached from None
    return False
"""
# Families of sockets that no network namespace holds, or that no program needs.
FAMILIES: Final = {
    "AX25": 3, "IPX": 4, "APPLETALK": 5, "X25": 9, "KEY": 15, "PACKET": 17, "RDS": 21, "PPPOX": 24, "LLC": 26,
    "IB": 27, "MPLS": 28, "CAN": 29, "TIPC": 30, "BLUETOOTH": 31, "RXRPC": 33, "PHONET": 35, "IEEE802154": 36,
    "CAIF": 37, "ALG": 38, "NFC": 39, "VSOCK": 40, "KCM": 41, "QIPCRTR": 42, "SMC": 43, "XDP": 44, "MCTP": 45,
}  # fmt: skip
EPILOGUE: Final = """
host = json.loads(HOST)
try:
    out = attempt(host)
except Reached:
    print("GOT TO THE KERNEL", flush=True)
except BaseException as error:
    print("held by", type(error).__name__, flush=True)
else:
    print("GOT OUT" if out else "held", flush=True)
"""

ESCAPES: Final[dict[str, str]] = {
    # Files
    "read the passwords": "return read('/etc/shadow')",
    "read the users": "return read('/etc/passwd')",
    "read a secret file": "return read(host['secret'])",
    "read a secret by the root of its init": "return read('/proc/1/root' + host['secret'])",
    "read a secret by its own root": "return read('/proc/self/root' + host['secret'])",
    "read a secret by the folder above": "return read('../' * 20 + host['secret'])",
    "read a secret by a symbolic link": "os.symlink(host['secret'], 'link'); return read('link')",
    "read a secret by a hard link": "os.link(host['secret'], 'link'); return read('link')",
    "read a secret by the folder of a process": "return read(f\"/proc/{host['pid']}/cwd/../..{host['secret']}\")",
    "read the code of rlinf": "return read(host['code'])",
    "list the homes": "return bool(os.listdir('/home'))",
    "find packages of this interpreter": "import torch; return True",
    "write into /usr": "return write('/usr/x')",
    "write into the interpreter": "return write(os.path.join(os.path.dirname(os.__file__), 'x.py'))",
    "write into the root": "return write('/x')",
    "write a device folder": "return write('/dev/x')",
    "fill shared memory": "return write('/dev/shm/x', bytes(1 << 20))",
    "fill the disk by one file": "return write('x', bytes(64 << 20))",
    "fill the disk by many files": "[write(str(n), bytes(1 << 20)) for n in range(64)]; return True",
    "make a file of a terabyte": "os.truncate(os.open('x', os.O_CREAT | os.O_RDWR), 1 << 40); return True",
    "read the memory of the machine": "return read('/dev/mem')",
    "read a disk": "return any([read(p) for p in ('/dev/vda', '/dev/sda', '/dev/nvme0n1')])",
    "make a disk and read it": "os.mknod('disk', 0o60600, os.makedev(254, 0)); return read('disk')",
    "change the root": "os.chroot('/proc/1/root'); return True",
    "use a file that was left open": (
        "return any(os.path.isdir(f'/proc/self/fd/{n}') or os.path.isfile(f'/proc/self/fd/{n}') for n in range(3, 64)"
        " if os.path.exists(f'/proc/self/fd/{n}'))"
    ),
    "speak to docker": "s = socket.socket(socket.AF_UNIX); s.connect('/var/run/docker.sock'); return True",
    "read the settings of the kernel's devices": "return bool(os.listdir('/sys'))",
    "change the kernel's helper": "return write('/proc/sys/kernel/modprobe', b'/tmp/x')",
    "change the kernel's dumps": "return write('/proc/sys/kernel/core_pattern', b'|/tmp/x')",
    "restart the machine by a key": "return write('/proc/sysrq-trigger', b'b')",
    # Mounts and namespaces
    "mount a file system": "return call('mount', b'none', b'/tmp', b'tmpfs', 0, None)",
    "mount its root anew, to write": "return call('mount', None, b'/', None, 32 | 4096, None)",
    "take a mount away": "return call('umount2', b'/tmp', 2)",
    "make a user namespace": "return call('unshare', 0x10000000)",
    "make a mount namespace": "return call('unshare', 0x20000)",
    "make a network namespace": "return call('unshare', 0x40000000)",
    "enter the network of its init": "return call('setns', os.open('/proc/1/ns/net', 0), 0)",
    "enter the mounts of this process": "return call('setns', os.open(f\"/proc/{host['pid']}/ns/mnt\", 0), 0)",
    # Network
    "connect to a port of this machine": ("socket.create_connection(('127.0.0.1', host['port']), 2); return True"),
    # Nothing listens there: to be refused is to have reached it.
    "connect to this machine's address": (
        "code = socket.socket().connect_ex((host['address'], host['port']));"
        " return code in (0, 111) and not host['address'].startswith('127.')"
    ),
    "connect to another machine": "socket.create_connection(('1.1.1.1', 80), 2); return True",
    "send a datagram away": (
        "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.sendto(b'x', ('1.1.1.1', 53)); return True"
    ),
    "ask for a name": "return bool(socket.getaddrinfo('pypi.org', 443))",
    "connect to an abstract socket": (
        "s = socket.socket(socket.AF_UNIX); s.connect('\\0' + host['abstract']); return True"
    ),
    "connect to a socket file": "s = socket.socket(socket.AF_UNIX); s.connect(host['socket']); return True",
    "open a raw socket": "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1); return True",
    **{f"open a socket of {name}": f"return any_kind({number})" for name, number in FAMILIES.items()},
    "speak to the host of a virtual machine": (
        "s = socket.socket(40, socket.SOCK_STREAM); s.settimeout(1); s.connect((2, 1)); return True"
    ),
    "listen to the host of a virtual machine": (
        "s = socket.socket(40, socket.SOCK_STREAM); s.bind((0xFFFFFFFF, 5000)); s.listen(); return True"
    ),
    "open a socket whose family has high bits": "return syscall(SOCKET, ctypes.c_long((1 << 32) | 40), 1, 0)",
    "open a socket by the second name of the call": "return X86 and syscall(0x40000000 | 41, 40, 1, 0)",
    "open a pair of sockets of another family": "return syscall(SOCKETPAIR, 30, 1, 0, (ctypes.c_int * 2)())",
    "open a socket by a ring": "return syscall(425, 8, ctypes.create_string_buffer(120))",
    "open a packet socket": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW); return True",
    # Processes and privileges
    "see the process that started it": "os.kill(host['pid'], 0); return True",
    "end the process that started it": "os.kill(host['pid'], signal.SIGKILL); return True",
    "end all processes": "os.kill(-1, signal.SIGKILL); return os.path.exists(f\"/proc/{host['pid']}\")",
    "read the variables of another process": "return read(f\"/proc/{host['pid']}/environ\")",
    "find a secret in its variables": "return host['value'] in str(os.environ)",
    "find a secret in all variables": (
        "return any(host['value'].encode() in open(f'/proc/{n}/environ', 'rb').read() for n in os.listdir('/proc')"
        " if n.isdigit() and os.access(f'/proc/{n}/environ', os.R_OK))"
    ),
    "end its parent": "os.kill(os.getppid(), signal.SIGKILL); time.sleep(0.1); return not os.path.exists('/proc/1')",
    "stop its parent": "os.kill(os.getppid(), signal.SIGSTOP); return open('/proc/1/stat').read().split()[2] == 'T'",
    "end its parent's group": (
        "os.killpg(os.getpgid(os.getppid()), signal.SIGKILL); return not os.path.exists('/proc/1')"
    ),
    "be told of its end instead of ended": "signal.signal(signal.SIGKILL, signal.SIG_IGN); return True",
    "trace another process": "return syscall(101, 16, host['pid'], 0, 0)",
    "read the memory of another process": "return read(f\"/proc/{host['pid']}/mem\")",
    "read a key of the host": "return syscall(250, 11, host['key'], ctypes.create_string_buffer(64), 64, 0)",
    "keep a key of its own": "return syscall(248, b'user', b'x', b'x', 1, -3)",
    "make a ring of system calls": "return syscall(425, 4, ctypes.create_string_buffer(120))",
    "become root": "os.setuid(0); return True",
    "become another user": "os.setuid(1); return True",
    "become root by a program": (
        "return subprocess.run(['/usr/bin/su', '-c', 'true'], stdin=subprocess.DEVNULL, capture_output=True)"
        ".returncode == 0"
    ),
    "leave its groups": "os.setgroups([]); return True",
    "raise its limit of processes": "resource.setrlimit(resource.RLIMIT_NPROC, (4096, 4096)); return True",
    "raise its limit of memory": "resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40)); return True",
    "raise its limit of time": "resource.setrlimit(resource.RLIMIT_CPU, (1 << 20, 1 << 20)); return True",
    "be the last that the kernel ends": "return write('/proc/self/oom_score_adj', b'-1000')",
    "come before all others": "os.setpriority(os.PRIO_PROCESS, 0, -10); return True",
    "take a processor for itself": ("os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50)); return True"),
    "choose its scheduler": "os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0)); return True",
    "choose its scheduler's parameters": "os.sched_setparam(0, os.sched_param(0)); return True",
    "choose its scheduler by attributes": (
        "return syscall(314, 0, ctypes.create_string_buffer(struct.pack('<IIQiIQQQ', 48, 3, 0, 0, 0, 0, 0, 0)), 0)"
    ),
    "keep a limit of priorities": (
        "return any(resource.getrlimit(kind) != (0, 0) for kind in (resource.RLIMIT_RTPRIO, resource.RLIMIT_NICE))"
    ),
    "fork without end": (
        "made = 0\n"
        "    while made < 100:\n"
        "        if os.fork() == 0:\n"
        "            time.sleep(2)\n"
        "            os._exit(0)\n"
        "        made += 1\n"
        "    return True"
    ),
    "start threads without end": (
        "[threading.Thread(target=time.sleep, args=(2,)).start() for _ in range(100)]; return True"
    ),
    "take memory without end": "return bool([bytearray(1 << 24) for _ in range(100)])",
    "take memory by a number": "return 1 << (1 << 33)",
    "keep memory in segments of System V": "return libc.shmget(0, 1 << 20, 0o1600) >= 0",
    "keep memory in queues of System V": "return libc.msgget(0, 0o1600) >= 0",
    "keep memory in files without a name": "return os.memfd_create('x') >= 0",
    "call itself without end": "return attempt(host)",
    # The machine
    "rename the machine": "return call('sethostname', b'x', 1)",
    "set the clock": "time.clock_settime(time.CLOCK_REALTIME, 0); return True",
    "restart the machine": "return syscall(169, 0xFEE1DEAD, 672274793, 0x1234567, None)",
    "read the kernel's memory": "return read('/proc/kcore')",
    "read the kernel's messages": "return read('/proc/kmsg')",
    "load a module": "return syscall(175, b'', 0, b'')",
    "swap to a file": "write('x', bytes(1 << 16)); return call('swapon', b'/tmp/x', 0)",
    "load a program into the kernel": "return syscall(321, 5, ctypes.create_string_buffer(128), 128)",
    "write into the terminal": (
        "import fcntl, termios; fcntl.ioctl(os.open('/dev/tty', os.O_RDWR), termios.TIOCSTI, b'x'); return True"
    ),
}


def program_of(attempt: str, host: str) -> str:
    """Return the program of an attempt; `host` is JSON."""
    return f"{PROLOGUE}\nHOST = {host!r}\ndef attempt(host):\n    {attempt}\n{EPILOGUE}"
