//! Compiles the protocol with protox: no `protoc` on the machine, nothing generated checked in.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=proto/zds.proto");
    let descriptors = protox::compile(["zds.proto"], ["proto"])?;
    prost_build::Config::new().compile_fds(descriptors)?;
    Ok(())
}
