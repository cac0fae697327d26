use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{mpsc, Arc, Mutex};
use std::thread::{self, JoinHandle};

type Job = Box<dyn FnOnce() + Send + 'static>;

pub struct Workers {
    sender: Option<mpsc::Sender<Job>>,
    threads: Vec<JoinHandle<()>>,
    finished: Arc<AtomicUsize>,
}

impl Workers {
    pub fn new(count: usize) -> Workers {
        let (sender, receiver) = mpsc::channel::<Job>();
        let receiver = Arc::new(Mutex::new(receiver));
        let finished = Arc::new(AtomicUsize::new(0));
        let threads = (0..count)
            .map(|_| {
                let (receiver, finished) = (Arc::clone(&receiver), Arc::clone(&finished));
                thread::spawn(move || loop {
                    let job = receiver.lock().unwrap().recv();
                    let Ok(job) = job else { break };
                    job();
                    finished.fetch_add(1, Ordering::Relaxed);
                })
            })
            .collect();
        Workers { sender: Some(sender), threads, finished }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        drop(self.sender.take());
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
