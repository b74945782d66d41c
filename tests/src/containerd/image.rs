//! Container images that the lab assembles: a program and the libraries that it needs, in one layer.

use std::{
    collections::BTreeMap,
    env::consts::ARCH,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::json;
use sha2::{Digest as _, Sha256};

use crate::process;

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";

/// An image: its name, and the program that is its entrypoint.
#[derive(Clone, Debug)]
pub struct Image {
    name: String,
    program: PathBuf,
}

impl Image {
    /// Name of the pods' image, the pause container's too.
    pub const POD: &str = "localhost/pod:1";

    /// `lab_pod`.
    pub fn pod() -> Self {
        Self { name: Self::POD.to_owned(), program: process::program("lab_pod") }
    }

    /// Another program that was built along with the tests.
    pub fn of(program: &str) -> Self {
        Self { name: format!("localhost/{program}:1"), program: process::program(program) }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Writes it as an OCI archive (image-spec 1.0, image-layout.md).
    pub(crate) fn write(&self, archive: &Path) -> io::Result<()> {
        let mut blobs = BTreeMap::new();
        let layer = keep(&mut blobs, self.layer()?);
        let config = json!({
            "architecture": if ARCH == "aarch64" { "arm64" } else { "amd64" },
            "os": "linux",
            "config": { "Entrypoint": ["/entrypoint"] },
            "rootfs": { "type": "layers", "diff_ids": [layer.0] },
        });
        let config = keep(&mut blobs, config.to_string().into_bytes());
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": { "mediaType": CONFIG, "digest": config.0, "size": config.1 },
            "layers": [{ "mediaType": LAYER, "digest": layer.0, "size": layer.1 }],
        });
        let manifest = keep(&mut blobs, manifest.to_string().into_bytes());
        let index = json!({
            "schemaVersion": 2,
            "manifests": [{
                "mediaType": MANIFEST,
                "digest": manifest.0,
                "size": manifest.1,
                "annotations": {
                    "io.containerd.image.name": self.name,
                    "org.opencontainers.image.ref.name": self.name,
                },
            }],
        });
        let mut tar = tar::Builder::new(File::create(archive)?);
        append(&mut tar, "oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#)?;
        append(&mut tar, "index.json", index.to_string().as_bytes())?;
        for (digest, blob) in blobs {
            append(&mut tar, &format!("blobs/{}", digest.replace(':', "/")), &blob)?;
        }
        tar.into_inner()?.sync_data()
    }

    fn layer(&self) -> io::Result<Vec<u8>> {
        let mut tar = tar::Builder::new(Vec::new());
        append(&mut tar, "entrypoint", &fs::read(&self.program)?)?;
        for library in libraries(&self.program)? {
            append(&mut tar, library.trim_start_matches('/'), &fs::read(&library)?)?;
        }
        tar.into_inner()
    }
}

/// Paths of the libraries that a program is linked to, and of the loader.
fn libraries(program: &Path) -> io::Result<Vec<String>> {
    let listed = Command::new("ldd").arg(program).output()?;
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    Ok(listed.split_whitespace().filter(|word| word.starts_with('/')).map(str::to_owned).collect())
}

/// Digest and size.
fn keep(blobs: &mut BTreeMap<String, Vec<u8>>, blob: Vec<u8>) -> (String, usize) {
    let digest: String = Sha256::digest(&blob).iter().map(|byte| format!("{byte:02x}")).collect();
    let (digest, size) = (format!("sha256:{digest}"), blob.len());
    blobs.insert(digest.clone(), blob);
    (digest, size)
}

fn append<W: io::Write>(tar: &mut tar::Builder<W>, path: &str, content: &[u8]) -> io::Result<()> {
    let mut header = tar::Header::new_gnu();
    header.set_size(content.len() as u64);
    header.set_mode(0o755);
    tar.append_data(&mut header, path, content)
}
