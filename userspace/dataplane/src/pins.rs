//! Every path below the bpffs.
//!
//! ```text
//! <bpffs>/culvert/v1/maps/<MAP>          shared maps
//!                    links/<PROGRAM>     links on the cgroup root
//!                    pods/<COOKIE>       the sk_lookup link of a pod's netns, cookie in decimal: as long as
//!                                        the maps hold anything of it
//! ```

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use crate::Error;

/// Changes with every incompatible change of a map's layout or meaning.
const LAYOUT: &str = "v1";

/// The directories of our pins.
#[derive(Clone, Debug)]
pub(crate) struct Pins {
    root: PathBuf,
}

impl Pins {
    /// Below the mount point of a bpffs. Creates the directories.
    pub(crate) fn create(bpffs: &Path) -> Result<Self, Error> {
        let pins = Self { root: bpffs.join("culvert").join(LAYOUT) };
        for directory in [pins.maps(), pins.root.join("links"), pins.root.join("pods")] {
            fs::create_dir_all(&directory).map_err(Error::path("create pin directory", directory))?;
        }
        Ok(pins)
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    pub(crate) fn maps(&self) -> PathBuf {
        self.root.join("maps")
    }

    pub(crate) fn map(&self, name: &str) -> PathBuf {
        self.maps().join(name)
    }

    pub(crate) fn link(&self, program: &str) -> PathBuf {
        self.root.join("links").join(program)
    }

    pub(crate) fn pod(&self, cookie: u64) -> PathBuf {
        self.root.join("pods").join(cookie.to_string())
    }

    /// The cookies of all pods.
    pub(crate) fn pods(&self) -> Result<Vec<u64>, Error> {
        let directory = self.root.join("pods");
        let entries = fs::read_dir(&directory).map_err(Error::path("list", &directory))?;
        Ok(entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect())
    }
}

/// Removes a pin; one that is not there is no error.
pub(crate) fn unpin(path: &Path) -> Result<(), Error> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(Error::path("remove pin", path)(error)),
        _ => Ok(()),
    }
}
