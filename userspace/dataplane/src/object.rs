//! The compiled programs.

use aya::EbpfLoader;
use aya_obj::Object as Parsed;
use culvert_abi::names;
use object::{Object as _, ObjectSection as _, ObjectSymbol as _};

use crate::{Error, pins::Pins};

static NODE: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/node.o"));
static POD: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/pod.o"));

/// The two objects, and one loader for both. `EbpfLoader::new` reads and parses the kernel's BTF (17 ms),
/// so there is one for the life of the process.
pub(crate) struct Objects {
    loader: EbpfLoader<'static>,
    pod: Vec<u8>,
    pod_netns: usize,
}

/// Shape of a map.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    /// Its type (`enum bpf_map_type`).
    pub(crate) kind: u32,
    /// Bytes of a key.
    pub(crate) key: u32,
    /// Bytes of a value.
    pub(crate) value: u32,
    /// Capacity.
    pub(crate) entries: u32,
    /// Creation flags.
    pub(crate) flags: u32,
}

impl Objects {
    /// Prepares loading; maps are shared through `pins`.
    pub(crate) fn new(pins: &Pins) -> Result<Self, Error> {
        if NODE.is_empty() || POD.is_empty() {
            return Err(Error::ObjectMissing);
        }
        let mut loader = EbpfLoader::new();
        for map in names::MAPS {
            loader.map_pin_path(map, pins.map(map));
        }
        Ok(Self { loader, pod: POD.to_vec(), pod_netns: offset_of(POD, names::POD_NETNS)? })
    }

    /// Loads the node object for a host netns.
    pub(crate) fn load_node(&mut self, host_netns: u64) -> Result<aya::Ebpf, Error> {
        let mut image = NODE.to_vec();
        write_global(&mut image, offset_of(NODE, names::HOST_NETNS)?, host_netns);
        self.loader.load(&image).map_err(load_error("node.o"))
    }

    /// Loads an instance of the pod object for a pod's netns.
    pub(crate) fn load_pod(&mut self, netns: u64) -> Result<aya::Ebpf, Error> {
        write_global(&mut self.pod, self.pod_netns, netns);
        self.loader.load(&self.pod).map_err(load_error("pod.o"))
    }
}

/// The shape that the node object gives a map.
pub(crate) fn expected_shape(map: &str) -> Result<Shape, Error> {
    let wrong = |reason| Error::Object { object: "node.o", reason };
    let parsed = Parsed::parse(NODE).map_err(|error| wrong(error.to_string()))?;
    let Some(definition) = parsed.maps.get(map) else {
        return Err(wrong(format!("it has no map {map}")));
    };
    Ok(Shape {
        kind: definition.map_type(),
        key: definition.key_size(),
        value: definition.value_size(),
        entries: definition.max_entries(),
        flags: definition.map_flags(),
    })
}

/// Where the image of an object holds a read-only global of eight bytes.
///
/// `EbpfLoader::override_global` would need a reference that lives as long as the loader, for a value
/// that is another one for each pod.
fn offset_of(image: &[u8], global: &str) -> Result<usize, Error> {
    let wrong = |reason: String| Error::Object { object: "pod.o or node.o", reason };
    let file = object::File::parse(image).map_err(|error| wrong(error.to_string()))?;
    let symbol = file.symbols().find(|symbol| symbol.name() == Ok(global) && symbol.size() == 8);
    let place = symbol.and_then(|symbol| {
        let section = file.section_by_index(symbol.section_index()?).ok()?;
        let (start, _) = section.file_range()?;
        usize::try_from(start + symbol.address()).ok()
    });
    place.filter(|place| place + 8 <= image.len()).ok_or_else(|| wrong(format!("it has no global {global}")))
}

fn write_global(image: &mut [u8], offset: usize, value: u64) {
    image[offset..offset + 8].copy_from_slice(&value.to_ne_bytes());
}

fn load_error(object: &'static str) -> impl FnOnce(aya::EbpfError) -> Error {
    move |source| Error::Load { object, source: Box::new(source) }
}
