// SPDX-License-Identifier: Apache-2.0

// Command testapp is the program of the containers in the tests of localcluster. Each command is a small action through
// which a test can observe what a container can see and do.
//
//	testapp write FILE TEXT      writes a file
//	testapp cat FILE...          prints files
//	testapp env NAME...          prints environment variables
//	testapp fetch URL            prints the response of an HTTP server, retrying until a request succeeds
//	testapp exit CODE [MESSAGE]  prints the message and exits
//	testapp message CODE TEXT    writes the termination message and exits
//	testapp serve [flags]        runs an HTTP server, see serve
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/signal"
	"strconv"
	"sync/atomic"
	"syscall"
	"time"
)

func main() {
	if len(os.Args) < 2 {
		fail(fmt.Errorf("usage: testapp ACTION [ARGUMENT...]"))
	}
	args := os.Args[2:]
	actions := map[string]func([]string) error{
		"write": write, "cat": cat, "env": env, "fetch": fetch, "exit": exit, "message": message, "serve": serve,
	}
	action, ok := actions[os.Args[1]]
	if !ok {
		fail(fmt.Errorf("unknown action %q", os.Args[1]))
	}
	if err := action(args); err != nil {
		fail(err)
	}
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, "testapp:", err)
	os.Exit(1)
}

func need(args []string, n int) error {
	if len(args) < n {
		return fmt.Errorf("%d arguments, want %d", len(args), n)
	}
	return nil
}

func write(args []string) error {
	if err := need(args, 2); err != nil {
		return err
	}
	return os.WriteFile(args[0], []byte(args[1]), 0o644)
}

func cat(args []string) error {
	for _, path := range args {
		data, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		fmt.Printf("%s\n", data)
	}
	return nil
}

func env(args []string) error {
	for _, name := range args {
		fmt.Printf("%s=%s\n", name, os.Getenv(name))
	}
	return nil
}

func fetch(args []string) error {
	if err := need(args, 1); err != nil {
		return err
	}
	var last error
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		body, err := get(args[0])
		if err == nil {
			fmt.Print(body)
			return nil
		}
		last = err
	}
	return last
}

func get(url string) (string, error) {
	response, err := http.Get(url)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", response.Status, body)
	}
	return string(body), err
}

func exit(args []string) error {
	if err := need(args, 1); err != nil {
		return err
	}
	code, err := strconv.Atoi(args[0])
	if err != nil {
		return err
	}
	if len(args) > 1 {
		fmt.Println(args[1])
	}
	os.Exit(code)
	return nil
}

func message(args []string) error {
	if err := need(args, 2); err != nil {
		return err
	}
	if err := os.WriteFile("/dev/termination-log", []byte(args[1]), 0o644); err != nil {
		return err
	}
	return exit(args[:1])
}

// serve runs an HTTP server until SIGTERM: / returns the text, /file?path= returns a file, /get?url= returns the
// response of another server, /hook records its call, /health fails after /break and succeeds again after /repair.
func serve(args []string) error {
	flags := flag.NewFlagSet("serve", flag.ContinueOnError)
	address := flags.String("address", "", "address to listen on")
	text := flags.String("text", "", "what / says")
	drain := flags.Duration("drain", 0, "how long to go on after SIGTERM")
	healthy := flags.Bool("healthy", true, "what /health says at first")
	if err := flags.Parse(args); err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	var health atomic.Bool
	health.Store(*healthy)
	http.HandleFunc("/{$}", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, *text) })
	http.HandleFunc("/file", func(w http.ResponseWriter, r *http.Request) {
		data, err := os.ReadFile(r.URL.Query().Get("path"))
		reply(w, string(data), err)
	})
	http.HandleFunc("/get", func(w http.ResponseWriter, r *http.Request) {
		body, err := get(r.URL.Query().Get("url"))
		reply(w, body, err)
	})
	http.HandleFunc("/hook", func(http.ResponseWriter, *http.Request) { fmt.Println("hook called") })
	http.HandleFunc("/break", func(http.ResponseWriter, *http.Request) { health.Store(false) })
	http.HandleFunc("/repair", func(http.ResponseWriter, *http.Request) { health.Store(true) })
	http.HandleFunc("/health", func(w http.ResponseWriter, _ *http.Request) {
		if !health.Load() {
			http.Error(w, "broken", http.StatusServiceUnavailable)
		}
	})
	failed := make(chan error, 1)
	go func() { failed <- http.ListenAndServe(*address, nil) }()
	select {
	case err := <-failed:
		return err
	case <-ctx.Done():
	}
	fmt.Println("terminating")
	time.Sleep(*drain)
	fmt.Println("done")
	return nil
}

func reply(w http.ResponseWriter, body string, err error) {
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	fmt.Fprint(w, body)
}
