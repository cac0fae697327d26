// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"github.com/semmoe/operator/test/ports"
	"github.com/semmoe/operator/test/processes"
	"github.com/semmoe/operator/test/programs"
)

// start starts a server with a free port of this machine, and returns its address. If the server ends before stop, the
// context of the run ends with an error that names the log.
func (t *try) start(name, program string, args ...string) (address string, err error) {
	path, err := programs.Built(program)
	if err != nil {
		return "", err
	}
	number, release, err := ports.Hold()
	if err != nil {
		return "", err
	}
	port := strconv.Itoa(number)
	process, err := processes.Spawn(t.file(name+".log"), nil, path, append(args, "--host", "127.0.0.1", "--port", port)...)
	if err != nil {
		release()
		return "", err
	}
	t.running = append(t.running, process)
	go func() {
		<-process.Ended()
		release()
		t.cancel(fmt.Errorf("%s has ended: see %s", program, process.Log()))
	}()
	return net.JoinHostPort("127.0.0.1", port), nil
}

// startEngine starts a reference engine and waits until it serves.
func (t *try) startEngine(ctx context.Context, name string, args ...string) (address string, err error) {
	size := strconv.Itoa(ranks)
	address, err = t.start(name, "semmoe-refengine", append([]string{"--model-path", t.model, "--ep-size", size, "--tp-size", size, "--dp-size", size,
		"--enable-dp-attention", "--enable-return-routed-experts"}, args...)...)
	if err != nil {
		return "", err
	}
	return address, until(ctx, func() (bool, error) {
		response, err := http.Get("http://" + address + "/health")
		if err != nil {
			return false, nil // not listening yet
		}
		return response.StatusCode == http.StatusOK, response.Body.Close()
	})
}

// startRouter starts a request router in front of an engine.
func (t *try) startRouter(name, engine string, args ...string) (address string, err error) {
	return t.start(name, "semmoe", append([]string{"router", "--backends", "http://" + engine, "--engine", "SGLang", "--metrics-port", "0"}, args...)...)
}

// stop ends all servers: first the routers, then the engines.
func (t *try) stop() error {
	t.cancel(nil)
	var all error
	for i := len(t.running) - 1; i >= 0; i-- {
		select {
		case <-t.running[i].Ended(): // Ctrl-C reaches the servers too, and any other end is the cause of the context
		default:
			all = errors.Join(all, t.running[i].Stop())
		}
	}
	return all
}

// semmoe runs a command of semmoe to its end, and returns its output.
func (t *try) semmoe(ctx context.Context, args ...string) ([]byte, error) {
	path, err := programs.Built("semmoe")
	if err != nil {
		return nil, err
	}
	var stderr bytes.Buffer
	command := exec.CommandContext(ctx, path, args...)
	command.Cancel = func() error { return command.Process.Signal(os.Interrupt) }
	command.WaitDelay = 5 * time.Second
	command.Stderr = &stderr
	output, err := command.Output()
	if err != nil {
		return nil, fmt.Errorf("%w: %s", err, strings.TrimSpace(stderr.String()))
	}
	return output, nil
}

// until polls until done returns true or an error, or the context ends.
func until(ctx context.Context, done func() (bool, error)) error {
	for {
		if ok, err := done(); ok || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(20 * time.Millisecond):
		}
	}
}
