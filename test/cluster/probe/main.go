// SPDX-License-Identifier: Apache-2.0

// Command probe is the program of the pods that verify the test cluster. It is an HTTP server, and has a few commands
// that replace the shell, which an image with a single binary lacks.
package main

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"
)

const usage = "usage: probe serve | get URL | read FILE | write FILE TEXT"

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "probe:", err)
		os.Exit(1)
	}
}

func run(arguments []string) error {
	verb := ""
	if len(arguments) > 0 {
		verb = arguments[0]
	}
	switch {
	case verb == "serve" && len(arguments) == 1:
		return serve()
	case verb == "get" && len(arguments) == 2:
		return get(arguments[1])
	case verb == "read" && len(arguments) == 2:
		content, err := os.ReadFile(arguments[1])
		if err != nil {
			return err
		}
		_, err = os.Stdout.Write(content)
		return err
	case verb == "write" && len(arguments) == 3:
		return os.WriteFile(arguments[1], []byte(arguments[2]+"\n"), 0o644)
	default:
		return errors.New(usage)
	}
}

// serve returns the pod's name and $VERSION to every request until SIGTERM or SIGINT. /readyz succeeds after
// $READY_AFTER.
func serve() error {
	name, err := os.Hostname()
	if err != nil {
		return err
	}
	var delay time.Duration
	if text := os.Getenv("READY_AFTER"); text != "" {
		if delay, err = time.ParseDuration(text); err != nil {
			return fmt.Errorf("READY_AFTER: %w", err)
		}
	}
	ready := time.Now().Add(delay)
	http.HandleFunc("/readyz", func(w http.ResponseWriter, _ *http.Request) {
		if time.Now().Before(ready) {
			http.Error(w, "not yet", http.StatusServiceUnavailable)
		}
	})
	http.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintln(w, name, os.Getenv("VERSION"))
	})
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM, syscall.SIGINT)
	failed := make(chan error, 1)
	go func() { failed <- http.ListenAndServe(":8080", nil) }()
	fmt.Println("serving", os.Getenv("VERSION"))
	select {
	case err := <-failed:
		return err
	case <-stop:
		return nil
	}
}

// get prints the response of the URL.
func get(url string) error {
	client := http.Client{Timeout: 5 * time.Second}
	response, err := client.Get(url)
	if err != nil {
		return err
	}
	defer func() { _ = response.Body.Close() }()
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", url, response.Status)
	}
	_, err = io.Copy(os.Stdout, response.Body)
	return err
}
