//! Two captured pods with a tunnel between them.

use crate::{lab::Lab, pod::Pod, ztunnel::Behaviour};

/// ztunnel reaches the server by its tunnel port only: a SYN to the server's own port on a wire, or a word in
/// clear beside the tunnel, is the workload's own.
pub struct Tunnelled {
    /// Everything else.
    pub lab: Lab,
    /// Who connects.
    pub client: Pod,
    /// To whom.
    pub server: Pod,
}

impl Tunnelled {
    /// The first two pods of a new lab.
    #[expect(clippy::new_without_default, reason = "it starts processes")]
    pub fn new() -> Self {
        let tunnel = ["10.244.0.3", "fd00:244::3"].map(|address| address.parse().expect("an address"));
        let lab = Lab::builder().ztunnel(Behaviour { tunnel: tunnel.into(), ..Behaviour::default() }).start();
        let (client, server) = (lab.pod("client").captured(), lab.pod("server").captured());
        Self { lab, client, server }
    }
}
