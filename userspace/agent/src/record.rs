//! Enrolled pods on disk, for the agent that comes after this one.
//!
//! One file per sandbox, named by the cookie of its netns, in the run directory, which a reboot clears.
//! It is written before the first change to the netns and removed after the last one was taken back:
//! whatever moment an agent is killed at, the next one finds a record of what there is to finish.

use std::{
    collections::BTreeSet,
    fs, io,
    io::Write as _,
    net::IpAddr,
    os::unix::fs::DirBuilderExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

use serde::{Deserialize, Serialize};

use crate::enroll::{Attachment, NetnsId, Pod};

/// Format of the file; one of another version is not read.
const VERSION: u32 = 1;
const SUFFIX: &str = ".json";
/// Temporary files begin like this, so that a later agent finds what a killed one left.
const TEMPORARY: &str = ".writing-";

/// How far the sandbox is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// Some step of its ADD is under way: to be undone by whoever finds it.
    Enrolling,
    /// The ADD succeeded: to be served.
    Enrolled,
    /// It is being taken out of the mesh: to be finished.
    Leaving,
}

/// What is known of a sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// How far it is.
    pub phase: Phase,
    /// Whose it is.
    pub pod: Pod,
    /// Where its netns is, as the agent sees it.
    pub netns: PathBuf,
    /// What that path must name.
    pub netns_id: NetnsId,
    /// The kernel's identity of it.
    pub cookie: u64,
    /// Its addresses.
    pub addresses: BTreeSet<IpAddr>,
    /// What the pod asks for.
    pub bypass_inbound: bool,
    /// Who asked for it.
    pub attachments: BTreeSet<Attachment>,
    /// When its last ADD began, since the boot.
    #[serde(default)]
    pub since: Duration,
}

#[derive(Serialize, Deserialize)]
struct File<R> {
    version: u32,
    #[serde(flatten)]
    record: R,
}

/// The directory or a file of it cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("cannot {verb} {path}")]
pub struct Error {
    verb: &'static str,
    path: PathBuf,
    source: io::Error,
}

fn failed(verb: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error { verb, path, source }
}

/// The directory of the records.
#[derive(Clone, Debug)]
pub struct Records {
    directory: PathBuf,
}

impl Records {
    /// Makes the directory if needed, mode 0700.
    pub fn open(directory: PathBuf) -> Result<Self, Error> {
        let records = Self { directory };
        records.make_directory().map_err(failed("create", &records.directory))?;
        Ok(records)
    }

    fn make_directory(&self) -> io::Result<()> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.directory)
    }

    /// Writes or replaces a record in one step. Not synced: no reboot is survived. A directory that
    /// somebody removed is made again.
    pub fn write(&self, record: &Record) -> Result<(), Error> {
        let path = self.path(record.cookie);
        let failed = |source| failed("write", &path)(source);
        let temporary = || tempfile::Builder::new().prefix(TEMPORARY).tempfile_in(&self.directory);
        let mut file = match temporary() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.make_directory().and_then(|()| temporary())
            }
            made => made,
        }
        .map_err(failed)?;
        let text =
            serde_json::to_vec(&File { version: VERSION, record }).map_err(|error| failed(error.into()))?;
        file.write_all(&text).map_err(failed)?;
        file.persist(&path).map_err(|error| failed(error.error))?;
        Ok(())
    }

    /// Removes a record. There may be none.
    pub fn remove(&self, cookie: u64) -> Result<(), Error> {
        let path = self.path(cookie);
        // unlink(2) of nothing fails on a read-only file system.
        if matches!(path.try_exists(), Ok(false)) {
            return Ok(());
        }
        match fs::remove_file(&path) {
            Err(error) if !matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                Err(failed("remove", &path)(error))
            }
            _ => Ok(()),
        }
    }

    /// Every record. One that cannot be read is logged and left where it is; what a killed writer left is
    /// removed.
    pub fn read(&self) -> Result<Vec<Record>, Error> {
        let read = |source| failed("read", &self.directory)(source);
        let mut records = Vec::new();
        for entry in fs::read_dir(&self.directory).map_err(read)? {
            let path = entry.map_err(read)?.path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            if name.starts_with(TEMPORARY) {
                fs::remove_file(&path).map_err(failed("remove", &path))?;
            } else if name.ends_with(SUFFIX) {
                match decode(&path) {
                    Ok(record) => records.push(record),
                    Err(error) => {
                        tracing::error!(path = %path.display(), %error, "a pod's record cannot be read; the pod is not served");
                    }
                }
            }
        }
        records.sort_by_key(|record| record.cookie);
        Ok(records)
    }

    fn path(&self, cookie: u64) -> PathBuf {
        self.directory.join(format!("{cookie}{SUFFIX}"))
    }
}

fn decode(path: &Path) -> io::Result<Record> {
    let File { version, record } = serde_json::from_slice(&fs::read(path)?)?;
    if version == VERSION { Ok(record) } else { Err(io::Error::other(format!("version {version}"))) }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    pub(crate) fn record(cookie: u64) -> Record {
        Record {
            phase: Phase::Enrolled,
            pod: Pod {
                uid: format!("uid-{cookie}"),
                namespace: "shop".into(),
                name: "web-0".into(),
                service_account: "web".into(),
            },
            netns: "/var/run/netns/cni-1".into(),
            netns_id: NetnsId { dev: 4, ino: 4026532000 },
            cookie,
            addresses: ["10.0.0.7".parse().unwrap(), "fd00::7".parse().unwrap()].into(),
            bypass_inbound: false,
            attachments: [Attachment {
                network: Some("podnet".into()),
                container_id: Some("c1".into()),
                if_name: Some("eth0".into()),
            }]
            .into(),
            since: Duration::from_millis(cookie),
        }
    }

    fn records() -> (tempfile::TempDir, Records) {
        let directory = tempfile::tempdir().unwrap();
        let records = Records::open(directory.path().join("pods")).unwrap();
        (directory, records)
    }

    #[test]
    fn what_was_written_is_read_in_its_last_phase() {
        let (_directory, records) = records();
        records.write(&record(7)).unwrap();
        records.write(&Record { phase: Phase::Leaving, ..record(7) }).unwrap();
        records.write(&record(3)).unwrap();
        let read = records.read().unwrap();
        assert_eq!(read, [record(3), Record { phase: Phase::Leaving, ..record(7) }]);
    }

    #[test]
    fn removing_is_final_and_repeatable() {
        let (_directory, records) = records();
        records.write(&record(7)).unwrap();
        records.remove(7).unwrap();
        records.remove(7).unwrap();
        assert_eq!(records.read().unwrap(), []);
    }

    #[test]
    fn damaged_records_and_strangers_do_not_hide_the_others() {
        let (_directory, records) = records();
        records.write(&record(7)).unwrap();
        for (name, text) in [
            ("1.json", ""),
            ("2.json", "{\"version\":1}"),
            ("3.json", "{\"version\":2}"),
            ("README", "hello"),
            (".writing-killed", "{"),
        ] {
            fs::write(records.directory.join(name), text).unwrap();
        }
        assert_eq!(records.read().unwrap(), [record(7)]);
        assert!(!records.directory.join(".writing-killed").exists());
        assert!(records.directory.join("README").exists());
    }

    #[test]
    fn only_root_reads_them() {
        let (_directory, records) = records();
        records.write(&record(7)).unwrap();
        only_root_may_use(&records);
    }

    fn only_root_may_use(records: &Records) {
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&records.directory), mode(&records.path(7))), (0o700, 0o600));
    }

    #[test]
    fn a_directory_that_went_away_is_made_again() {
        let (_directory, records) = records();
        fs::remove_dir(&records.directory).unwrap();
        records.write(&record(7)).unwrap();
        assert_eq!(records.read().unwrap(), [record(7)]);
        only_root_may_use(&records);
    }

    #[test]
    fn a_directory_that_cannot_be_made_is_an_error_that_names_the_file() {
        let (_directory, records) = records();
        fs::remove_dir(&records.directory).unwrap();
        fs::write(&records.directory, "in the way").unwrap();
        let error = records.write(&record(7)).unwrap_err().to_string();
        assert!(error.contains("pods/7.json"), "{error}");
    }
}
