// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"time"

	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/internal/profile"
)

// recordWithTransformers records a profile with the recorder at --endpoint, or with one that it starts.
func recordWithTransformers(ctx context.Context, o profileOptions, inputs profile.Options) (*profile.Profile, error) {
	if o.endpoint != "" {
		return profile.RunTransformers(ctx, inputs)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	endpoint, stop, err := startRecorder(ctx, o, cancel)
	if err != nil {
		return nil, err
	}
	defer stop()
	inputs.Endpoint = endpoint
	recorded, err := profile.RunTransformers(ctx, inputs)
	if cause := context.Cause(ctx); err != nil && errors.Is(cause, errRecorderEnded) {
		return nil, cause
	}
	return recorded, err
}

// errRecorderEnded reports that the recorder has ended before it answered.
var errRecorderEnded = errors.New("the recorder ended early")

// startRecorder starts the recorder on a free port of the loopback interface. The end of the process cancels the
// context with errRecorderEnded as its cause.
func startRecorder(ctx context.Context, o profileOptions, cancel context.CancelCauseFunc) (endpoint string, stop func(), err error) {
	args := append([]string{"-c", profile.TransformersRecorder, "--model-path=" + o.model, "--host=127.0.0.1", "--port=0"}, o.recorderArgs...)
	command := exec.CommandContext(ctx, o.python, args...)
	command.Stderr = os.Stderr
	command.Cancel = func() error { return command.Process.Signal(syscall.SIGTERM) }
	command.WaitDelay = 10 * time.Second
	out, err := command.StdoutPipe()
	if err != nil {
		return "", nil, err
	}
	if err := command.Start(); err != nil {
		return "", nil, checkpoint.Invalidf("--python: failed to start %s: %v", o.python, err)
	}
	lines := bufio.NewScanner(out)
	var listening struct {
		Port int `json:"port"`
	}
	if started := lines.Scan(); !started || json.Unmarshal(lines.Bytes(), &listening) != nil || listening.Port == 0 {
		if started {
			cancel(nil) // it runs, and is another program
		}
		return "", nil, checkpoint.Invalidf("--python, --recorder-arg: the recorder did not start: %v", command.Wait())
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for lines.Scan() { // what libraries print
		}
		cancel(fmt.Errorf("%w: %w", errRecorderEnded, command.Wait()))
	}()
	return fmt.Sprintf("http://127.0.0.1:%d", listening.Port), func() { cancel(nil); <-ended }, nil
}
