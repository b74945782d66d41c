//! What runs in the lab's containers: nothing but `std`, so that its first act is its first millisecond.

use std::{env, net::TcpStream, thread, time::Instant};

#[expect(clippy::print_stdout, reason = "the container's log")]
fn main() {
    let begin = Instant::now();
    // Without an argument it is the sandbox's own process, which only has to be there.
    if let Some(destination) = env::args().nth(1) {
        match TcpStream::connect(&*destination) {
            Ok(stream) => match (stream.local_addr(), begin.elapsed().as_micros()) {
                (Ok(local), time) => println!("connected {local} {time} us"),
                (Err(error), _) => println!("failed {error}"),
            },
            Err(error) => println!("failed {error}"),
        }
    }
    loop {
        thread::park();
    }
}
