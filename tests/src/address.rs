//! Addresses as tests write them.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// IPv4 or IPv6, for tests that run with both.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl Family {
    /// Both.
    pub const BOTH: [Self; 2] = [Self::V4, Self::V6];

    /// The family of an address.
    pub fn of(address: IpAddr) -> Self {
        match address {
            IpAddr::V4(_) => Self::V4,
            IpAddr::V6(_) => Self::V6,
        }
    }

    /// 0.0.0.0 or ::.
    pub fn any(self) -> IpAddr {
        match self {
            Self::V4 => Ipv4Addr::UNSPECIFIED.into(),
            Self::V6 => Ipv6Addr::UNSPECIFIED.into(),
        }
    }

    /// 127.0.0.1 or ::1.
    pub fn loopback(self) -> IpAddr {
        match self {
            Self::V4 => Ipv4Addr::LOCALHOST.into(),
            Self::V6 => Ipv6Addr::LOCALHOST.into(),
        }
    }
}

/// What can be written where an address and port are wanted: `"10.244.0.2:80"`, `(ip, 80)`.
pub trait IntoAddress {
    /// The address.
    fn into_address(self) -> SocketAddr;
}

impl IntoAddress for SocketAddr {
    fn into_address(self) -> SocketAddr {
        self
    }
}

impl IntoAddress for &str {
    fn into_address(self) -> SocketAddr {
        self.parse().unwrap_or_else(|error| panic!("{self:?}: {error}"))
    }
}

impl<I: Into<IpAddr>> IntoAddress for (I, u16) {
    fn into_address(self) -> SocketAddr {
        self.into()
    }
}

/// IPv4 in its own form, not as an IPv6 address.
pub(crate) fn canonical(address: SocketAddr) -> SocketAddr {
    match address {
        SocketAddr::V6(v6) => match v6.ip().to_ipv4_mapped() {
            Some(v4) => SocketAddr::new(v4.into(), v6.port()),
            None => address,
        },
        SocketAddr::V4(_) => address,
    }
}
