//! One form for every IP address.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// An IP address: 16 bytes in network order, IPv4 as `::ffff:a.b.c.d`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address {
    /// The address's bytes, most significant first.
    pub bytes: [u8; 16],
}

const _: () = assert!(size_of::<Address>() == 16);

impl Address {
    /// From an IPv4 address as the kernel's contexts hold it: four bytes in network order.
    #[inline(always)]
    pub const fn from_v4_be(address_be: u32) -> Self {
        Self::from_v6_be([0, 0, MAPPED_BE, address_be])
    }

    /// From an IPv6 address as the kernel's contexts hold it: four words in network order.
    #[inline(always)]
    pub const fn from_v6_be(words_be: [u32; 4]) -> Self {
        // SAFETY: both are sixteen bytes for which every bit pattern is valid.
        Self { bytes: unsafe { core::mem::transmute::<[u32; 4], [u8; 16]>(words_be) } }
    }

    /// The words in network order. Everything in this type works on them: taken apart into bytes, an
    /// address costs the compiled programs several times the instructions, and the verifier the time.
    #[inline(always)]
    const fn words_be(&self) -> [u32; 4] {
        // SAFETY: as above.
        unsafe { core::mem::transmute::<[u8; 16], [u32; 4]>(self.bytes) }
    }

    /// Whether the upper 96 bits are those of an IPv4-mapped address.
    #[inline(always)]
    pub const fn is_v4(&self) -> bool {
        let [a, b, c, _] = self.words_be();
        a | b == 0 && c == MAPPED_BE
    }

    /// 127.0.0.0/8 or ::1, and the unspecified addresses: `connect()` to 0.0.0.0 or :: reaches the
    /// loopback address, and cgroup hooks see the address before the kernel replaces it.
    #[inline(always)]
    pub const fn is_loopback(&self) -> bool {
        let [a, b, c, d_be] = self.words_be();
        let d = u32::from_be(d_be);
        a | b == 0 && (c == MAPPED_BE && (d >> 24 == 127 || d == 0) || c == 0 && d <= 1)
    }
}

/// The third word of an IPv4-mapped address, in network order.
const MAPPED_BE: u32 = 0xffff_u32.to_be();

impl From<IpAddr> for Address {
    fn from(address: IpAddr) -> Self {
        match address {
            IpAddr::V4(v4) => Self { bytes: v4.to_ipv6_mapped().octets() },
            IpAddr::V6(v6) => Self { bytes: v6.octets() },
        }
    }
}

impl From<Address> for IpAddr {
    fn from(address: Address) -> Self {
        Ipv6Addr::from(address.bytes).to_canonical()
    }
}

impl From<Ipv4Addr> for Address {
    fn from(address: Ipv4Addr) -> Self {
        IpAddr::V4(address).into()
    }
}

/// Key of `OWN_ADDRESSES`: an address configured on an interface of one netns. Two pods may own the
/// same address (172.17.0.1 of docker-in-docker).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OwnAddress {
    /// Cookie of the netns (`SO_NETNS_COOKIE`).
    pub netns: u64,
    /// The address.
    pub address: Address,
}

const _: () = assert!(size_of::<OwnAddress>() == 24);

#[cfg(test)]
mod tests {
    extern crate std;

    use std::string::ToString as _;

    use super::*;

    fn address(text: &str) -> Address {
        text.parse::<IpAddr>().unwrap().into()
    }

    #[test]
    fn every_spelling_of_an_ipv4_address_is_one_key() {
        let dotted = address("10.1.2.3");
        assert_eq!(dotted, address("::ffff:10.1.2.3"));
        assert_eq!(dotted, Address::from_v4_be(u32::from_ne_bytes([10, 1, 2, 3])));
        let words = [0, 0, 0xffff_u32.to_be(), u32::from_ne_bytes([10, 1, 2, 3])];
        assert_eq!(dotted, Address::from_v6_be(words));
        assert_eq!(IpAddr::from(dotted).to_string(), "10.1.2.3");
    }

    #[test]
    fn loopback_is_127_slash_8_and_v6_1_and_whatever_connect_turns_into_them() {
        for text in ["127.0.0.1", "127.0.0.9", "127.255.255.255", "::1", "0.0.0.0", "::", "::ffff:0.0.0.0"] {
            assert!(address(text).is_loopback(), "{text}");
        }
        for text in ["126.0.0.1", "128.0.0.1", "::2", "fe80::1", "1::1", "10.0.0.127", "0.0.0.1", "::7f00:1"]
        {
            assert!(!address(text).is_loopback(), "{text}");
        }
    }

    #[test]
    fn only_the_mapped_prefix_is_ipv4() {
        for text in ["::1", "::", "fd00::1", "::fffe:10.0.0.1", "::10.0.0.1", "64:ff9b::10.0.0.1"] {
            assert!(!address(text).is_v4(), "{text}");
        }
        assert!(address("10.0.0.1").is_v4());
    }
}
