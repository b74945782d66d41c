//! How a stand-in misbehaves when it is asked to.

/// The faults on the command line.
#[derive(Debug, clap::Args)]
pub struct Faults {
    /// Wait this many milliseconds before every ack
    #[arg(long, value_name = "MS", default_value_t = 0)]
    pub ack_delay: u64,
    /// Never ack
    #[arg(long)]
    pub silent: bool,
    /// Be silent, slow or garbled only after this many requests
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub sane_for: u32,
    /// Never ack an add of this workload; may be repeated
    #[arg(long, value_name = "UID")]
    pub ignore: Vec<String>,
    /// Refuse this workload with this text; may be repeated
    #[arg(long, value_name = "UID=TEXT")]
    pub nack: Vec<String>,
    /// End without an ack at the Nth request
    #[arg(long, value_name = "N")]
    pub die_after: Option<u32>,
    /// Send bytes that are no message instead of acks
    #[arg(long)]
    pub garbage: bool,
    /// Do not set IP_TRANSPARENT, as without the capability
    #[arg(long)]
    pub no_transparent: bool,
    /// Listen on 0.0.0.0 only, as with IPV6_ENABLED=false
    #[arg(long)]
    pub v4_only: bool,
}

impl Faults {
    /// The text to refuse a workload with.
    pub(super) fn refusal(&self, uid: &str) -> Option<&str> {
        self.nack
            .iter()
            .filter_map(|nack| nack.split_once('='))
            .find_map(|(refused, text)| (refused == uid).then_some(text))
    }
}
