//! One HTTP request on a connection, as curl would send it.

use std::io::{self, Read, Write};

/// Status and body of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// For example 200.
    pub status: u16,
    /// The body.
    pub body: String,
}

/// Sends a request and reads until the server closes.
pub fn request(
    mut stream: impl Read + Write,
    method: &str,
    path: &str,
    body: impl AsRef<[u8]>,
) -> io::Result<Answer> {
    let body = body.as_ref();
    let length = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nHost: lab\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n"
    )?;
    stream.write_all(body)?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    parse(&String::from_utf8_lossy(&answer)).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

fn parse(answer: &str) -> Option<Answer> {
    let (head, body) = answer.split_once("\r\n\r\n")?;
    let status = head.split(' ').nth(1)?.parse().ok()?;
    Some(Answer { status, body: body.to_owned() })
}
