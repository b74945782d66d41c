//! What a node must offer: found when it is there, named with its remedy when it is not. And the
//! compiled objects, loaded by another loader than ours.

#![expect(clippy::unwrap_used, reason = "test code outside #[test] functions: a panic shows the line")]

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use culvert_abi::names;
use culvert_dataplane::{Config, probe};
use culvert_tests::Lab;

/// A lab of which nothing is running, and what its node would be configured with: the lab's own
/// cgroup is not the root that the probe asks for.
fn node() -> (Lab, Config) {
    let lab = Lab::builder().without_dataplane().without_ztunnel().start();
    let cgroup = probe::find_cgroup2().unwrap();
    let config = Config { cgroup, ..lab.config().clone() };
    (lab, config)
}

/// The only check that fails: its name, and reason and remedy.
fn only_failure(report: &probe::Report) -> (&'static str, &probe::Failure) {
    assert!(!report.is_ready());
    let mut failed = report.checks.iter().filter_map(|check| Some((check.name, check.failure.as_ref()?)));
    let first = failed.next().unwrap();
    assert!(failed.next().is_none(), "{report}");
    first
}

/// What is below the bpffs, the kernel's own `progs.debug` and `maps.debug` aside.
fn pins(config: &Config) -> Vec<PathBuf> {
    let paths = fs::read_dir(&config.bpffs).unwrap().map(|entry| entry.unwrap().path());
    paths.filter(|path| path.extension().is_none_or(|extension| extension != "debug")).collect()
}

#[test]
fn this_machine_is_ready_and_nothing_stays_behind() {
    let (lab, config) = node();
    let before = lab.node().footprint();
    let report = probe::run(&config);
    assert!(report.is_ready(), "{report}");
    assert!(report.checks.iter().any(|check| check.name == "programs load and attach"), "{report}");
    assert!(report.to_string().lines().all(|line| line.starts_with("ok ")), "{report}");
    assert!(pins(&config).is_empty(), "{:?}", pins(&config));
    before.expect_same(&lab.node().footprint());
}

#[test]
fn a_cgroup_below_the_root_is_named_with_its_remedy() {
    let (lab, config) = node();
    let report = probe::run(lab.config());
    let (name, failure) = only_failure(&report);
    assert_eq!(name, "root of the cgroup2 hierarchy");
    assert!(failure.reason.contains(lab.config().cgroup.to_str().unwrap()), "{report}");
    assert!(failure.remedy.contains("/sys/fs/cgroup"), "{report}");
    assert!(pins(&config).is_empty(), "no program is to be loaded: {:?}", pins(&config));
}

#[test]
fn a_directory_that_is_no_cgroup_is_named_with_its_remedy() {
    let (_lab, config) = node();
    let report = probe::run(&Config { cgroup: "/run/netns".into(), ..config });
    let (name, failure) = only_failure(&report);
    assert_eq!(name, "root of the cgroup2 hierarchy");
    assert_eq!(failure.reason, "/run/netns is no cgroup2");
}

#[test]
fn a_directory_that_is_no_bpffs_is_named_with_its_remedy() {
    let (_lab, config) = node();
    for (path, reason) in [("/run/netns", "is no bpffs"), ("/run/netns/absent", "ENOENT")] {
        let report = probe::run(&Config { bpffs: path.into(), ..config.clone() });
        let (name, failure) = only_failure(&report);
        assert!(name.contains("bpffs"), "{report}");
        assert!(failure.reason.contains(path) && failure.reason.contains(reason), "{report}");
        assert!(failure.remedy.contains("mount -t bpf bpf /sys/fs/bpf"), "{report}");
    }
}

#[test]
fn a_host_netns_that_cannot_be_opened_is_named_with_its_remedy() {
    let (_lab, config) = node();
    let report = probe::run(&Config { host_netns: "/run/netns/absent".into(), ..config });
    let (name, failure) = only_failure(&report);
    assert_eq!(name, "host network namespace");
    assert!(failure.reason.contains("/run/netns/absent"), "{report}");
    assert!(failure.remedy.contains("--host-netns"), "{report}");
}

#[test]
fn a_read_only_proc_is_named_with_its_remedy() {
    let (_lab, config) = node();
    let proc = Path::new("/run/netns/proc");
    fs::create_dir(proc).unwrap();
    for arguments in [["--bind", "/proc"], ["-o", "remount,bind,ro"]] {
        assert!(Command::new("mount").args(arguments).arg(proc).status().unwrap().success());
    }
    let report = probe::run(&Config { proc: proc.into(), ..config });
    let (name, failure) = only_failure(&report);
    assert_eq!(name, "sysctls of a pod can be written");
    assert!(failure.reason.contains("/run/netns/proc/sys/net"), "{report}");
    assert!(failure.remedy.contains("--host-proc"), "{report}");
}

#[test]
fn each_missing_capability_is_named_with_its_remedy() {
    let (_lab, config) = node();
    for missing in [&["NET_ADMIN"][..], &["SYS_ADMIN"], &["BPF"], &["NET_ADMIN", "SYS_ADMIN", "BPF"]] {
        let mut probe = Command::new(env!("CARGO_BIN_EXE_lab_probe"));
        probe.arg("--bpffs").arg(&config.bpffs).arg("--cgroup").arg(&config.cgroup);
        probe.arg("--host-netns").arg(&config.host_netns);
        probe.args(missing.iter().map(|name| format!("--without=CAP_{name}")));
        let output = probe.output().unwrap();
        let report = String::from_utf8_lossy(&output.stdout);
        assert_eq!(output.status.code(), Some(1), "{report}{}", String::from_utf8_lossy(&output.stderr));
        assert!(report.contains(&format!("found: missing: {}\n", missing.join(", "))), "{report}");
        assert!(report.contains("do:    run as root, or add them to"), "{report}");
        assert!(pins(&config).is_empty(), "{:?}", pins(&config));
    }
}

/// What `cargo xtask build-ebpf` has made, and this crate's library embeds.
fn object(name: &str) -> PathBuf {
    let objects = std::env::var_os("EBPF_OBJECTS");
    let built = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/ebpf");
    objects.map_or_else(built, PathBuf::from).join(name)
}

#[test]
fn both_objects_load_by_bpftool() {
    let (_lab, config) = node();
    for (object_name, programs) in [
        (
            "node.o",
            &[
                names::SOCK_CREATE,
                names::BIND4,
                names::BIND6,
                names::CONNECT4,
                names::CONNECT6,
                names::SETSOCKOPT,
                names::PROCESS_EXIT,
                names::SOCK_OPS,
            ][..],
        ),
        ("pod.o", &[names::SK_LOOKUP]),
    ] {
        let directory = config.bpffs.join(object_name.trim_end_matches(".o"));
        let mut bpftool = Command::new("bpftool");
        bpftool.args(["prog", "loadall"]).arg(object(object_name)).arg(&directory);
        bpftool.arg("pinmaps").arg(directory.join("maps"));
        let output = bpftool.output().unwrap();
        let log = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{object_name}: {log}");
        let pinned = |directory: &Path| {
            let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap());
            let files = entries.filter(|entry| !entry.path().is_dir());
            let mut names: Vec<_> = files.map(|entry| entry.file_name().into_string().unwrap()).collect();
            names.sort();
            names
        };
        let mut expected: Vec<_> = programs.iter().map(ToString::to_string).collect();
        expected.sort();
        assert_eq!(pinned(&directory), expected, "{object_name}");
        let maps = pinned(&directory.join("maps"));
        assert!(maps.contains(&names::PODS.to_owned()), "{object_name}: {maps:?}");
    }
}
