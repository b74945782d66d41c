//! The scope file: in which namespaces a pod may be one of the mesh.
//!
//! Written by the agent, read by the plugin when the agent does not answer: a pod of any other
//! namespace may start without it. On storage that survives a reboot, as the agent's pod is itself
//! started by the runtime.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io::{self, Read as _, Write as _},
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use serde::{Deserialize, Serialize};

use crate::document;

/// Where the file is unless the configuration says otherwise.
pub const DEFAULT_PATH: &str = "/var/lib/culvert/scope.json";

/// Format of the file. A reader takes any other for damaged.
const VERSION: u32 = 1;
/// A file longer than this is damaged. Some 15,000 namespaces of the longest name fit.
const LIMIT: u64 = 1 << 20;
/// Temporary files begin like this, so that a writer finds what a killed one left.
const TEMPORARY: &str = ".culvert-scope-";
/// A temporary file older than this belongs to nobody.
const ABANDONED: Duration = Duration::from_secs(60);

/// Content of the scope file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Scope {
    version: u32,
    /// Namespaces that a selector matches, and those in which a single pod matched.
    pub namespaces: BTreeSet<String>,
    /// When it was written, RFC 3339. For people; no reader decides by it.
    pub written_at: String,
    /// `/proc/sys/kernel/random/boot_id` of the writer. For people as well.
    #[serde(default, rename = "bootID", skip_serializing_if = "Option::is_none")]
    pub boot_id: Option<String>,
}

/// Why there is no scope.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No agent has run here yet.
    #[error("scope file {path} does not exist")]
    Missing {
        /// Where it should be.
        path: PathBuf,
    },
    /// The file or its directory cannot be used.
    #[error("cannot {verb} scope file {path}: {source}")]
    Io {
        /// What failed.
        verb: &'static str,
        /// Which file.
        path: PathBuf,
        /// The system's word.
        source: io::Error,
    },
    /// The file says something that no agent has written.
    #[error("scope file {path} is damaged: {why}")]
    Damaged {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
}

impl Scope {
    /// A scope of now.
    pub fn new(namespaces: impl IntoIterator<Item = String>, boot_id: Option<String>) -> Self {
        Self {
            version: VERSION,
            namespaces: namespaces.into_iter().collect(),
            written_at: humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
            boot_id,
        }
    }

    /// Whether a pod of the namespace may be one of the mesh.
    pub fn contains(&self, namespace: &str) -> bool {
        self.namespaces.contains(namespace)
    }

    /// Reads the file.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let damaged = |why: String| Error::Damaged { path: path.to_owned(), why };
        let unreadable = |source: io::Error| match source.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => {
                Error::Missing { path: path.to_owned() }
            }
            _ => Error::Io { verb: "read", path: path.to_owned(), source },
        };
        // Only a regular file: a fifo would be waited for.
        if !fs::metadata(path).map_err(unreadable)?.is_file() {
            return Err(damaged("not a regular file".to_owned()));
        }
        let mut bytes = Vec::new();
        File::open(path).map_err(unreadable)?.take(LIMIT + 1).read_to_end(&mut bytes).map_err(unreadable)?;
        if u64::try_from(bytes.len()).is_ok_and(|length| length > LIMIT) {
            return Err(damaged(format!("longer than {LIMIT} bytes")));
        }
        document::check(&bytes).map_err(|error| damaged(error.to_string()))?;
        let scope: Self = serde_json::from_slice(&bytes).map_err(|error| damaged(error.to_string()))?;
        if scope.version != VERSION {
            return Err(damaged(format!("version {} is not {VERSION}", scope.version)));
        }
        Ok(scope)
    }

    /// Replaces the file in one step, on the disk when this returns. Makes its directory if needed and
    /// removes temporary files of writers that were killed.
    pub fn write(&self, path: &Path) -> Result<(), Error> {
        let failed = |source| Error::Io { verb: "write", path: path.to_owned(), source };
        let directory =
            path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        fs::create_dir_all(directory).map_err(failed)?;
        remove_abandoned(directory);
        let mut file = tempfile::Builder::new().prefix(TEMPORARY).tempfile_in(directory).map_err(failed)?;
        serde_json::to_writer(&mut file, self).map_err(|error| failed(error.into()))?;
        file.write_all(b"\n").map_err(failed)?;
        file.as_file().sync_all().map_err(failed)?;
        file.persist(path).map_err(|error| failed(error.error))?;
        File::open(directory).and_then(|directory| directory.sync_all()).map_err(failed)
    }
}

/// Best effort: what cannot be removed now is removed by a later writer.
fn remove_abandoned(directory: &Path) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let ours = entry.file_name().to_str().is_some_and(|name| name.starts_with(TEMPORARY));
        let age = entry.metadata().and_then(|metadata| metadata.modified()).map(|time| time.elapsed());
        if ours && matches!(age, Ok(Ok(age)) if age > ABANDONED) {
            drop(fs::remove_file(entry.path()));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use rstest::rstest;

    use super::*;

    fn shop() -> Scope {
        Scope::new(["shop".to_owned(), "bank".to_owned()], Some("b1".to_owned()))
    }

    #[test]
    fn what_was_written_is_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("made/scope.json");
        shop().write(&path).unwrap();
        let read = Scope::read(&path).unwrap();
        assert_eq!(read, shop().with_time_of(&read));
        assert!(read.contains("shop") && !read.contains("default"));
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }

    impl Scope {
        fn with_time_of(mut self, other: &Self) -> Self {
            self.written_at.clone_from(&other.written_at);
            self
        }
    }

    #[test]
    fn a_second_write_replaces_the_first_and_leaves_nothing_else() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("scope.json");
        shop().write(&path).unwrap();
        Scope::new([], None).write(&path).unwrap();
        assert!(Scope::read(&path).unwrap().namespaces.is_empty());
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_killed_writer_s_file_is_removed_and_a_running_one_s_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let abandoned = directory.path().join(format!("{TEMPORARY}old"));
        let running = directory.path().join(format!("{TEMPORARY}new"));
        File::create(&running).unwrap();
        let hour_ago = SystemTime::now() - Duration::from_secs(3600);
        File::create(&abandoned).unwrap().set_modified(hour_ago).unwrap();
        shop().write(&directory.path().join("scope.json")).unwrap();
        assert!(!abandoned.exists() && running.exists());
    }

    #[test]
    fn a_missing_file_is_no_damaged_one() {
        let directory = tempfile::tempdir().unwrap();
        for path in ["scope.json", "no/scope.json"] {
            let error = Scope::read(&directory.path().join(path)).unwrap_err();
            assert!(matches!(error, Error::Missing { .. }), "{error}");
        }
    }

    #[rstest]
    #[case::empty("".into())]
    #[case::truncated(r#"{"version":1,"namespaces":["shop""#.into())]
    #[case::no_json("shop".into())]
    #[case::wrong_type(r#"{"version":1,"namespaces":"shop","writtenAt":"now"}"#.into())]
    #[case::key_twice(r#"{"version":1,"namespaces":[],"namespaces":[],"writtenAt":"now"}"#.into())]
    #[case::another_version(r#"{"version":2,"namespaces":[],"writtenAt":"now"}"#.into())]
    #[case::nested("[".repeat(100_000))]
    #[case::too_long(" ".repeat(2 << 20))]
    fn a_damaged_file_is_no_scope(#[case] content: String) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("scope.json");
        fs::write(&path, content).unwrap();
        assert!(matches!(Scope::read(&path), Err(Error::Damaged { .. })));
    }

    #[test]
    fn a_directory_or_a_fifo_is_no_scope() {
        let directory = tempfile::tempdir().unwrap();
        assert!(matches!(Scope::read(directory.path()), Err(Error::Damaged { .. })));
        let fifo = directory.path().join("fifo");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert!(matches!(Scope::read(&fifo), Err(Error::Damaged { .. })));
    }
}
