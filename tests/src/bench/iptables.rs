//! Istio's in-pod rules with DNS capture, as istio-cni applies them (1.27).

use std::{
    io::{self, Write as _},
    process::{Child, Command, Stdio},
};

use culvert_dataplane::Netns;

/// `LO` and `PROBE` stand for the family's addresses. Order and matches are those of
/// `cni/pkg/iptables/iptables.go`.
const RULES: &str = "\
*raw
:ISTIO_PRERT - [0:0]
:ISTIO_OUTPUT - [0:0]
-A PREROUTING -j ISTIO_PRERT
-A OUTPUT -j ISTIO_OUTPUT
-A ISTIO_PRERT -p udp -m mark ! --mark 0x539/0xfff -m udp --sport 53 -j CT --zone 1
-A ISTIO_OUTPUT -p udp -m mark --mark 0x539/0xfff -m udp --dport 53 -j CT --zone 1
COMMIT
*mangle
:ISTIO_PRERT - [0:0]
:ISTIO_OUTPUT - [0:0]
-A PREROUTING -j ISTIO_PRERT
-A OUTPUT -j ISTIO_OUTPUT
-A ISTIO_PRERT -m mark --mark 0x539/0xfff -j CONNMARK --set-xmark 0x111/0xfff
-A ISTIO_OUTPUT -m connmark --mark 0x111/0xfff -j CONNMARK --restore-mark --nfmask 0xffffffff --ctmask 0xffffffff
COMMIT
*nat
:ISTIO_PRERT - [0:0]
:ISTIO_OUTPUT - [0:0]
-A PREROUTING -j ISTIO_PRERT
-A OUTPUT -j ISTIO_OUTPUT
-A ISTIO_PRERT -s PROBE -p tcp -m tcp -j ACCEPT
-A ISTIO_PRERT ! -d LO -p tcp -m tcp ! --dport 15008 -m mark ! --mark 0x539/0xfff -j REDIRECT --to-ports 15006
-A ISTIO_OUTPUT -d PROBE -p tcp -m tcp -j ACCEPT
-A ISTIO_OUTPUT ! -o lo -p udp -m mark ! --mark 0x539/0xfff -m udp --dport 53 -j REDIRECT --to-ports 15053
-A ISTIO_OUTPUT ! -d LO -p tcp -m tcp --dport 53 -m mark ! --mark 0x539/0xfff -j REDIRECT --to-ports 15053
-A ISTIO_OUTPUT -p tcp -m mark --mark 0x111/0xfff -j ACCEPT
-A ISTIO_OUTPUT ! -d LO -o lo -j ACCEPT
-A ISTIO_OUTPUT ! -d LO -p tcp -m mark ! --mark 0x539/0xfff -j REDIRECT --to-ports 15001
COMMIT
";

const FAMILIES: [(&str, &str, &str); 2] = [
    ("iptables-restore", "127.0.0.1/32", "169.254.7.127/32"),
    ("ip6tables-restore", "::1/128", "fd16:9254:7127:1337:ffff:ffff:ffff:ffff/128"),
];

/// Applies the rules: the part that istio-cni does by a subprocess for each family.
pub(super) fn apply_rules(netns: &Netns) -> io::Result<()> {
    netns
        .run(|| {
            for (program, loopback, probe) in FAMILIES {
                restore(program, &RULES.replace("LO ", &format!("{loopback} ")).replace("PROBE", probe))?;
            }
            Ok(())
        })
        .map_err(io::Error::other)?
}

/// The routing that goes with them, which istio-cni does by netlink.
pub(super) fn apply_routing(netns: &Netns) -> io::Result<()> {
    let commands = || {
        ["-4", "-6"].into_iter().try_for_each(|family| {
            ip(family, "route add local default dev lo scope host table 100")?;
            ip(family, "rule add fwmark 0x111/0xfff pref 32764 lookup 100")
        })
    };
    netns.run(commands).map_err(io::Error::other)?
}

fn ip(family: &str, command: &str) -> io::Result<()> {
    succeed(Command::new("ip").arg(family).args(command.split(' ')).spawn()?)
}

fn restore(program: &str, rules: &str) -> io::Result<()> {
    let mut command = Command::new(program);
    command.args(["--noflush", "-v"]).stdin(Stdio::piped()).stdout(Stdio::null());
    let mut child = command.spawn()?;
    if let Some(mut stdin) = child.stdin.take() {
        stdin.write_all(rules.as_bytes())?;
    }
    succeed(child)
}

fn succeed(mut child: Child) -> io::Result<()> {
    let status = child.wait()?;
    if status.success() { Ok(()) } else { Err(io::Error::other(format!("iptables or ip: {status}"))) }
}
