//! Something with a network namespace: the node, a pod, a host outside.

use std::{
    fs, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::{Path, PathBuf},
    process::Command,
    sync::Arc,
    thread,
};

use culvert_dataplane::Netns;
use nix::{
    net::if_::if_nametoindex,
    sched::{CloneFlags, setns},
};
use tokio::runtime::Handle;

use crate::{
    address::{Family, IntoAddress},
    client::Dial,
    connection::Connection,
    ip,
    isolation::NETNS,
    server::{Listen, Server},
};

/// A network namespace by name, with one address per family on its first interface. Clones are the
/// same host.
#[derive(Clone, Debug)]
pub struct Host {
    name: Arc<str>,
    netns: Arc<Netns>,
    addresses: (Ipv4Addr, Ipv6Addr),
    runtime: Handle,
}

impl Host {
    /// The netns bound at /run/netns/`name`.
    pub(crate) fn open(name: &str, addresses: (Ipv4Addr, Ipv6Addr), runtime: Handle) -> Self {
        let netns = Netns::open(&Path::new(NETNS).join(name)).expect("a netns made just now");
        Self { name: name.into(), netns: Arc::new(netns), addresses, runtime }
    }

    /// Its name, which `ip -n` and /run/netns know too.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// /run/netns/`name`, for `nsenter --net=`.
    pub fn netns_path(&self) -> PathBuf {
        Path::new(NETNS).join(&*self.name)
    }

    /// The namespace.
    pub fn netns(&self) -> &Netns {
        &self.netns
    }

    /// The namespace's cookie, key of the dataplane's maps.
    pub fn cookie(&self) -> u64 {
        self.netns.cookie()
    }

    /// Its IPv4 address.
    pub fn v4(&self) -> Ipv4Addr {
        self.addresses.0
    }

    /// Its IPv6 address.
    pub fn v6(&self) -> Ipv6Addr {
        self.addresses.1
    }

    /// Its address of this family.
    pub fn address(&self, family: Family) -> IpAddr {
        match family {
            Family::V4 => self.v4().into(),
            Family::V6 => self.v6().into(),
        }
    }

    /// A port at its address of this family.
    pub fn at(&self, family: Family, port: u16) -> SocketAddr {
        (self.address(family), port).into()
    }

    /// Runs `work` on a new thread inside, which may give up what it would need to leave again. Sockets made
    /// there stay inside.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        let inside = || {
            #[expect(clippy::disallowed_methods, reason = "on a thread that ends")]
            setns(&*self.netns, CloneFlags::CLONE_NEWNET).expect("setns");
            work()
        };
        thread::scope(|scope| scope.spawn(inside).join())
            .unwrap_or_else(|_panic| panic!("in netns {}, caused by what is printed above", self.name))
    }

    /// A command that will run inside.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", self.netns_path().display())).arg(program);
        command
    }

    /// Lines for `ip -batch` inside, for example `"addr add 10.9.9.9/32 dev lo"`.
    pub fn ip(&self, script: &str) {
        ip::batch(Some(&self.name), script);
    }

    /// [`ip`](Self::ip) for one family, for example `"rule del pref 90"`.
    pub fn ip_of(&self, family: Family, script: &str) {
        ip::batch_of(family, Some(&self.name), script);
    }

    /// A sysctl of the namespace by its path below /proc/sys, for example `"net/ipv4/ip_forward"`.
    pub fn sysctl(&self, path: &str) -> String {
        let value = self.run(|| fs::read_to_string(Path::new("/proc/sys").join(path)));
        let value = value.unwrap_or_else(|error| panic!("sysctl {path}: {error}"));
        value.trim_end().to_owned()
    }

    /// Sets a sysctl of the namespace.
    pub fn set_sysctl(&self, path: &str, value: &str) {
        self.run(|| fs::write(Path::new("/proc/sys").join(path), value))
            .unwrap_or_else(|error| panic!("sysctl {path} = {value}: {error}"));
    }

    /// The kernel's number of an interface.
    pub fn interface_index(&self, interface: &str) -> u32 {
        self.run(|| if_nametoindex(interface)).unwrap_or_else(|error| panic!("{interface}: {error}"))
    }

    /// The link-local address of an interface.
    pub fn link_local(&self, interface: &str) -> Ipv6Addr {
        let addresses = self.run(|| fs::read_to_string("/proc/thread-self/net/if_inet6")).expect("if_inet6");
        let mut lines = addresses.lines().filter(|line| line.split(' ').next_back() == Some(interface));
        let address = lines.find_map(|line| line.get(..32).filter(|address| address.starts_with("fe80")));
        let address = address.unwrap_or_else(|| panic!("{interface} has no link-local address: {addresses}"));
        u128::from_str_radix(address, 16).expect("a hexadecimal address").into()
    }

    /// Connects as most programs do: a blocking TCP socket without options.
    pub fn connect(&self, to: impl IntoAddress) -> io::Result<Connection> {
        self.to(to).connect()
    }

    /// A connection with options.
    pub fn to(&self, to: impl IntoAddress) -> Dial<'_> {
        Dial::new(self, to.into_address())
    }

    /// A TCP server that echoes; `"[::]:80"` takes both families.
    pub fn serve(&self, on: impl IntoAddress) -> Server {
        self.listen(on).serve()
    }

    /// A server with options.
    pub fn listen(&self, on: impl IntoAddress) -> Listen<'_> {
        Listen::new(self, on.into_address())
    }

    pub(crate) fn runtime(&self) -> &Handle {
        &self.runtime
    }
}
