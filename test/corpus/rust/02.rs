use std::io::{self, BufRead, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;

fn handle(stream: TcpStream) -> io::Result<()> {
    let peer = stream.peer_addr()?;
    let mut writer = stream.try_clone()?;
    let reader = io::BufReader::new(stream);
    for line in reader.lines() {
        let line = line?;
        match line.trim() {
            "" => continue,
            "quit" => break,
            text => writeln!(writer, "{}", text.chars().rev().collect::<String>())?,
        }
    }
    eprintln!("{peer} has left");
    Ok(())
}

fn main() -> io::Result<()> {
    let listener = TcpListener::bind("127.0.0.1:7777")?;
    for stream in listener.incoming() {
        let stream = stream?;
        thread::spawn(move || {
            if let Err(error) = handle(stream) {
                eprintln!("connection failed: {error}");
            }
        });
    }
    Ok(())
}
