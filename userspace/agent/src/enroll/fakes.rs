//! A dataplane and a ztunnel of plain data, which fail, wait or stay silent when told to.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io,
    net::IpAddr,
    os::{
        fd::{AsFd, BorrowedFd},
        unix::fs::{FileExt as _, MetadataExt as _},
    },
    path::{Path, PathBuf},
    sync::{Arc, Condvar, Mutex, MutexGuard},
    time::Duration,
};

use culvert_dataplane::{Error, Options, Restored};
use culvert_zds::{Workload, WorkloadUid};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use super::{Add, Attachment, Enrollment, HostPaths, NetnsId, Pod, Redirect, Ztunnel};
use crate::{metrics::Metrics, record::Records, self_test};

/// An ordinary file stands for a netns; its inode is the cookie.
#[derive(Debug)]
pub(crate) struct Netns(File, u64);

impl AsFd for Netns {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The calls that can be made to fail or wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Call {
    Open,
    Register,
    Add,
    Check,
    Activate,
    SelfTest,
    Withdraw,
    Restore,
    Del,
}

#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) calls: Vec<Call>,
    pub(crate) registered: BTreeSet<u64>,
    pub(crate) active: BTreeSet<u64>,
    pub(crate) forgotten: BTreeSet<u64>,
    pub(crate) failing: BTreeSet<Call>,
    pub(crate) draining: BTreeSet<u64>,
    /// What the self-test finds.
    pub(crate) uncaptured: BTreeSet<u64>,
    held: BTreeSet<Call>,
    pub(crate) reached: BTreeSet<Call>,
}

#[derive(Debug, Default)]
pub(crate) struct Dataplane {
    state: Mutex<State>,
    released: Condvar,
    pub(crate) host: Option<u64>,
}

impl Dataplane {
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Calls wait from now on, until [`release`](Self::release).
    pub(crate) fn hold(&self, call: Call) {
        self.state().held.insert(call);
    }

    pub(crate) fn release(&self, call: Call) {
        self.state().held.remove(&call);
        self.released.notify_all();
    }

    fn call(&self, call: Call) -> Result<MutexGuard<'_, State>, Error> {
        let mut state = self.state();
        state.calls.push(call);
        state.reached.insert(call);
        let state = self.released.wait_while(state, |state| state.held.contains(&call)).unwrap();
        if state.failing.contains(&call) {
            return Err(Error::System { call: "fake", source: io::ErrorKind::Other.into() });
        }
        Ok(state)
    }
}

impl Redirect for Dataplane {
    type Netns = Netns;

    fn open(&self, path: &Path) -> Result<Netns, Error> {
        drop(self.call(Call::Open)?);
        let open = |path: &Path| {
            let file = File::open(path)?;
            let inode = file.metadata()?.ino();
            Ok(Netns(file, inode))
        };
        open(path).map_err(|source| Error::Path { action: "open netns", path: path.into(), source })
    }

    fn cookie(netns: &Netns) -> u64 {
        netns.1
    }

    /// Those that the file names.
    fn addresses(&self, netns: &Netns) -> Result<Vec<IpAddr>, Error> {
        let mut text = [0; 100];
        let length = netns.0.read_at(&mut text, 0).unwrap();
        let text = std::str::from_utf8(&text[..length]).unwrap();
        let text = if text.is_empty() { "10.0.0.99" } else { text };
        Ok(text.split_whitespace().map(|address| address.parse().unwrap()).collect())
    }

    fn register(&self, netns: &Netns, _addresses: &[IpAddr], _options: Options) -> Result<(), Error> {
        if self.host == Some(netns.1) {
            return Err(Error::HostNetns { cookie: netns.1 });
        }
        self.call(Call::Register)?.registered.insert(netns.1);
        Ok(())
    }

    fn check_listeners(&self, _netns: &Netns) -> Result<(), Error> {
        self.call(Call::Check).map(drop)
    }

    fn activate(&self, netns: &Netns) -> Result<(), Error> {
        self.call(Call::Activate)?.active.insert(netns.1);
        Ok(())
    }

    fn is_active(&self, netns: &Netns) -> Result<bool, Error> {
        Ok(self.state().active.contains(&netns.1))
    }

    fn self_test(
        &self,
        netns: &Netns,
        _addresses: &[IpAddr],
        _patience: Duration,
    ) -> Result<(), self_test::Error> {
        let state = self.call(Call::SelfTest)?;
        if state.uncaptured.contains(&netns.1) {
            let destination = "192.0.2.1:9".parse().unwrap();
            return Err(self_test::Error::NotCaptured { destination, counted: "nothing".into() });
        }
        Ok(())
    }

    fn withdraw(&self, netns: &Netns) -> Result<(), Error> {
        self.call(Call::Withdraw)?.active.remove(&netns.1);
        Ok(())
    }

    fn restore(&self, netns: &Netns) -> Result<Restored, Error> {
        let mut state = self.call(Call::Restore)?;
        if state.active.contains(&netns.1) {
            return Err(Error::NotRegistered { cookie: netns.1 });
        }
        if state.draining.contains(&netns.1) {
            return Ok(Restored::Draining(1));
        }
        state.registered.remove(&netns.1);
        Ok(Restored::Complete)
    }

    fn forget(&self, cookie: u64) -> Result<(), Error> {
        let mut state = self.state();
        state.registered.remove(&cookie);
        state.active.remove(&cookie);
        state.forgotten.insert(cookie);
        Ok(())
    }

    fn resume(&self, netns: &Netns, _addresses: &[IpAddr]) -> Result<(), Error> {
        if self.state().registered.contains(&netns.1) {
            Ok(())
        } else {
            Err(Error::NotRegistered { cookie: netns.1 })
        }
    }

    fn collect(&self) -> Result<Vec<u64>, Error> {
        Ok(Vec::new())
    }
}

/// How a ztunnel answers an add.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    Ack,
    Nack,
    Silence,
}

pub(crate) struct FakeZtunnel {
    dataplane: Arc<Dataplane>,
    /// By uid; the rest is acknowledged.
    pub(crate) answers: Mutex<BTreeMap<String, Answer>>,
    pub(crate) connected: watch::Sender<bool>,
    /// Inode of the netns that each uid is served in.
    pub(crate) served: Mutex<BTreeMap<String, u64>>,
    pub(crate) deleted: Mutex<Vec<String>>,
}

impl FakeZtunnel {
    fn new(dataplane: Arc<Dataplane>) -> Self {
        Self {
            dataplane,
            answers: Mutex::default(),
            connected: watch::Sender::new(true),
            served: Mutex::default(),
            deleted: Mutex::default(),
        }
    }
}

impl Ztunnel for FakeZtunnel {
    async fn add(&self, workload: Workload, deadline: Instant) -> Result<(), culvert_zds::Error> {
        self.keep(workload.clone());
        let dataplane = Arc::clone(&self.dataplane);
        tokio::task::spawn_blocking(move || dataplane.call(Call::Add).map(drop))
            .await
            .unwrap()
            .map_err(|_failed| nack())?;
        let mut connected = self.connected.subscribe();
        if tokio::time::timeout_at(deadline, connected.wait_for(|connected| *connected)).await.is_err() {
            return Err(culvert_zds::Error::NoZtunnel);
        }
        let answer = self.answers.lock().unwrap().get(workload.uid.as_str()).copied();
        match answer.unwrap_or(Answer::Ack) {
            Answer::Ack => Ok(()),
            Answer::Nack => Err(nack()),
            Answer::Silence => {
                sleep_until(deadline).await;
                Err(culvert_zds::Error::NoZtunnel)
            }
        }
    }

    fn keep(&self, workload: Workload) {
        let netns = NetnsId::of(&workload.netns).unwrap();
        self.served.lock().unwrap().insert(workload.uid.to_string(), netns.ino);
    }

    async fn del(&self, uid: &WorkloadUid) -> Result<(), culvert_zds::Error> {
        self.dataplane.state().calls.push(Call::Del);
        self.served.lock().unwrap().remove(uid.as_str());
        self.deleted.lock().unwrap().push(uid.to_string());
        Ok(())
    }
}

/// As good as a nack, which only the server can make.
fn nack() -> culvert_zds::Error {
    culvert_zds::wire::TooLarge { size: 2000 }.into()
}

/// An enrollment on a node of its own.
pub(crate) struct Node {
    pub(crate) dataplane: Arc<Dataplane>,
    pub(crate) ztunnel: Arc<FakeZtunnel>,
    pub(crate) enrollment: Arc<Enrollment<Dataplane, FakeZtunnel>>,
    pub(crate) records: Records,
    pub(crate) directory: tempfile::TempDir,
}

impl Node {
    pub(crate) fn new() -> Self {
        Self::with_host(None)
    }

    /// Whose host netns is the one of that pod.
    pub(crate) fn with_host(host: Option<&str>) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let host = host.map(|name| make_netns(directory.path(), name));
        let dataplane = Arc::new(Dataplane { host, ..Dataplane::default() });
        Self::on(dataplane, directory)
    }

    fn on(dataplane: Arc<Dataplane>, directory: tempfile::TempDir) -> Self {
        let ztunnel = Arc::new(FakeZtunnel::new(Arc::clone(&dataplane)));
        let records = Records::open(directory.path().join("pods")).unwrap();
        let paths = HostPaths { proc: directory.path().join("proc"), netns_prefix: "/".into() };
        fs::create_dir_all(&paths.proc).unwrap();
        let enrollment = Enrollment::new(
            Arc::clone(&dataplane),
            Arc::clone(&ztunnel),
            records.clone(),
            paths,
            Arc::new(Metrics::default()),
        );
        Self { dataplane, ztunnel, enrollment, records, directory }
    }

    /// The next agent on the same node: same kernel, same files, nothing else.
    pub(crate) fn restarted(self) -> Self {
        let Self { dataplane, directory, .. } = self;
        Self::on(dataplane, directory)
    }

    pub(crate) fn netns_path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Inode of a netns, made if needed.
    pub(crate) fn netns(&self, name: &str) -> u64 {
        make_netns(self.directory.path(), name)
    }

    /// The ADD of a pod whose sandbox has that name.
    pub(crate) fn request(&self, uid: &str, sandbox: &str) -> Add {
        self.netns(sandbox);
        Add {
            pod: Pod {
                uid: uid.into(),
                namespace: "shop".into(),
                name: format!("pod-{uid}"),
                service_account: "web".into(),
            },
            netns: self.netns_path(sandbox),
            netns_id: None,
            addresses: ["10.0.0.7".parse().unwrap()].into(),
            bypass_inbound: false,
            attachment: attachment("podnet", sandbox, "eth0"),
        }
    }

    /// A process of the pod in a netns that owns these addresses, found by `/proc` only.
    pub(crate) fn process(&self, pid: u32, uid: &str, netns: &str, addresses: &str) {
        fs::write(self.netns_path(netns), addresses).unwrap();
        let process = self.directory.path().join("proc").join(pid.to_string());
        fs::create_dir_all(process.join("ns")).unwrap();
        fs::hard_link(self.netns_path(netns), process.join("ns/net")).unwrap();
        let cgroup = format!("4:memory:/kubepods/burstable/pod{uid}/{pid:064x}\n0::/\n");
        fs::write(process.join("cgroup"), cgroup).unwrap();
        // The 22nd field is the start; the pid stands for it.
        let stat = format!("{pid} (app) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 {pid}{}\n", " 0".repeat(30));
        fs::write(process.join("stat"), stat).unwrap();
    }

    pub(crate) async fn add(&self, uid: &str, sandbox: &str) -> Result<(), super::Failure> {
        self.enrollment.add(self.request(uid, sandbox), soon()).await.map(drop)
    }

    /// Nothing of any pod: not in the kernel, not at ztunnel, not on disk, not in the table.
    pub(crate) fn assert_clean(&self) {
        let state = self.dataplane.state();
        assert_eq!((&state.registered, &state.active), (&BTreeSet::new(), &BTreeSet::new()));
        assert_eq!(*self.ztunnel.served.lock().unwrap(), BTreeMap::new());
        assert_eq!(self.records.read().unwrap(), []);
        assert_eq!(self.enrollment.dump(), []);
    }

    /// The pod is in the mesh with that sandbox.
    pub(crate) fn assert_enrolled(&self, uid: &str, sandbox: &str) {
        let cookie = self.netns(sandbox);
        assert!(self.dataplane.state().active.contains(&cookie), "{sandbox} is captured");
        assert_eq!(self.ztunnel.served.lock().unwrap().get(uid), Some(&cookie), "{sandbox} is served");
        let records = self.records.read().unwrap();
        assert!(records.iter().any(|record| record.cookie == cookie && record.pod.uid == uid), "{records:?}");
    }
}

fn make_netns(directory: &Path, name: &str) -> u64 {
    let path = directory.join(name);
    if !path.exists() {
        fs::write(&path, "").unwrap();
    }
    fs::metadata(path).unwrap().ino()
}

pub(crate) fn attachment(network: &str, container: &str, interface: &str) -> Attachment {
    Attachment {
        network: Some(network.into()),
        container_id: Some(container.into()),
        if_name: Some(interface.into()),
    }
}

pub(crate) fn soon() -> Instant {
    Instant::now() + Duration::from_secs(10)
}
