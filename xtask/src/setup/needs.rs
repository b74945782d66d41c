//! The table of what is needed, how to tell that it is there, and where it comes from.

use std::process::{Command, Stdio};

use super::{go, runtime};
use crate::workspace::Workspace;
use crate::{programs, toolchain};

pub(crate) struct Need {
    pub(super) name: &'static str,
    pub(super) is_met: fn(&Workspace) -> bool,
    pub(super) source: Source,
    /// Debian's, which provide it or are needed to build it.
    pub(super) packages: &'static [&'static str],
    /// What to do on other systems.
    pub(super) elsewhere: &'static str,
}

pub(super) enum Source {
    Packages,
    BpfLinker,
    Nextest,
    /// Unpacked, not installed: an installed containerd would start as a service of the machine.
    Runtime,
    Go,
}

/// Compiles the eBPF programs.
pub(crate) const BUILD: &[Need] = &[
    Need {
        name: "bpf-linker",
        is_met: toolchain::has_linker,
        source: Source::BpfLinker,
        packages: &["llvm-22-dev", "libpolly-22-dev", "libzstd-dev", "gcc", "g++"],
        elsewhere: "LLVM_PREFIX=LLVM-22 cargo install bpf-linker --no-default-features --features llvm-22",
    },
    Need {
        name: "rustc for eBPF",
        is_met: toolchain::has_compiler,
        source: Source::Packages,
        packages: &["rustc-web", "rust-web-src"],
        elsewhere: "rustup toolchain install nightly --component rust-src",
    },
    package("llvm-strip", toolchain::has_strip, &["llvm-22"], "rustup component add llvm-tools"),
];

/// Runs traffic between network namespaces.
pub(crate) const LAB: &[Need] = &[
    package("ip", |w| has(w, "ip"), &["iproute2"], "install iproute2"),
    package("iptables", |w| has(w, "iptables"), &["iptables"], "install iptables"),
    package("nft", |w| has(w, "nft"), &["nftables"], "install nftables"),
    package("bpftool", |w| has(w, "bpftool"), &["bpftool"], "install bpftool"),
];

/// Runs real pods: a container runtime, its plugins, and what drives it.
pub(crate) const RUNTIME: &[Need] = &[
    package("libseccomp", runtime::has_libseccomp, &["libseccomp2"], "install libseccomp 2"),
    Need {
        name: "containerd, runc and Debian's CNI plugins",
        is_met: runtime::is_unpacked,
        source: Source::Runtime,
        packages: &[],
        elsewhere: "unpack containerd 1.6, runc and the CNI plugins of Debian 12 into target/tools/runtime",
    },
    Need {
        name: "crictl, cnitool and current CNI plugins",
        is_met: go::is_built,
        source: Source::Go,
        packages: &[],
        elsewhere: "install Go 1.25 or later from https://go.dev/dl into /usr/local/go",
    },
];

/// Runs tests, each in a process of its own.
pub(crate) const NEXTEST: &[Need] = &[Need {
    name: "cargo-nextest",
    is_met: |w| has(w, "cargo-nextest"),
    source: Source::Nextest,
    packages: &[],
    elsewhere: "cargo install cargo-nextest --locked",
}];

/// Boots another kernel.
pub(crate) const VM: &[Need] = &[
    package("qemu", |w| has(w, "qemu-system-x86_64"), &["qemu-system-x86"], "install qemu for x86_64"),
    package("static busybox", has_static_busybox, &["busybox-static"], "install a static busybox"),
    package("depmod", |w| has(w, "depmod"), &["kmod"], "install kmod"),
    package("cpio", |w| has(w, "cpio"), &["cpio"], "install cpio"),
    package("xz", |w| has(w, "xz"), &["xz-utils"], "install xz"),
];

const fn package(
    name: &'static str,
    is_met: fn(&Workspace) -> bool,
    packages: &'static [&'static str],
    elsewhere: &'static str,
) -> Need {
    Need { name, is_met, source: Source::Packages, packages, elsewhere }
}

fn has(workspace: &Workspace, program: &str) -> bool {
    programs::find(workspace, program).is_some()
}

/// The one with shared libraries does not start in an initramfs.
fn has_static_busybox(workspace: &Workspace) -> bool {
    let Some(busybox) = programs::find(workspace, "busybox") else {
        return false;
    };
    // ldd fails on a static program.
    let ldd = Command::new("ldd").arg(busybox).stdout(Stdio::null()).stderr(Stdio::null()).status();
    ldd.is_ok_and(|status| !status.success())
}
