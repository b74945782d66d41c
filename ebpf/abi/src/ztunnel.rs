//! ztunnel's ports and the marks of sockets in a pod's netns.

/// Outbound connections of the workload (ztunnel `src/config.rs`, `DEFAULT_OUTBOUND_PORT`).
pub const OUTBOUND_PORT: u16 = 15001;
/// Inbound plaintext connections.
pub const INBOUND_PORT: u16 = 15006;
/// Inbound HBONE (mTLS tunnel) connections.
pub const HBONE_PORT: u16 = 15008;
/// DNS proxy, TCP and UDP, on 127.0.0.1 and ::1.
pub const DNS_PORT: u16 = 15053;

/// The part of a mark that Culvert and ztunnel use; the rest belongs to others.
pub const MARK_MASK: u32 = 0xfff;
/// Every socket that ztunnel opens carries it (`PACKET_MARK`). A fact, not an identity: a workload
/// with CAP_NET_RAW can set it too.
pub const ZTUNNEL_MARK: u32 = 0x539;
/// Packets of this socket must stay inside the netns.
pub const LOOP_MARK: u32 = 0x111;
/// Packets of this socket reach the pod's own addresses by the local table. An answer to them (a RST of
/// a workload that is gone), and they themselves when the address is gone, must stay inside the netns.
pub const ACCEPTED_MARK: u32 = 0x112;

/// Value of `SOCKET_LABELS` for a socket that a known ztunnel created; accepted sockets inherit it.
pub const LABEL_ZTUNNEL: u32 = 1;

/// The mark `mark` with our part replaced by `ours`.
#[inline(always)]
pub const fn with_mark(mark: u32, ours: u32) -> u32 {
    (mark & !MARK_MASK) | ours
}

/// Whether a workload may not bind this port.
#[inline(always)]
pub const fn is_reserved(port: u16) -> bool {
    matches!(port, OUTBOUND_PORT | INBOUND_PORT | HBONE_PORT | DNS_PORT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_keeps_the_bits_of_others() {
        assert_eq!(with_mark(0, LOOP_MARK), 0x111);
        assert_eq!(with_mark(0x40539, LOOP_MARK), 0x40111);
        assert_eq!(with_mark(0xffff_ffff, LOOP_MARK), 0xffff_f111);
    }

    #[test]
    fn reserved_ports_are_ztunnels_four() {
        let reserved = (0..=u16::MAX).filter(|port| is_reserved(*port));
        assert!(reserved.eq([15001, 15006, 15008, 15053]));
    }
}
