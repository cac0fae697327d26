// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"runtime/debug"
	"strings"

	"github.com/go-logr/logr"
	"github.com/spf13/cobra"

	"github.com/semmoe/operator/cmd/internal/cli"
	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/engine/registry"
	"github.com/semmoe/operator/internal/files/atomicfile"
	"github.com/semmoe/operator/internal/httpserver"
	"github.com/semmoe/operator/internal/probe"
	"github.com/semmoe/operator/internal/router/tlsfiles"
)

const (
	// probeMemory is the soft memory limit of the garbage collector, which keeps the process well below 64 MiB.
	probeMemory = 24 << 20
	// probeReadyPath is the path of the pod's readiness probe.
	probeReadyPath = "/readyz"
)

// probeFlags are the flags of semmoe probe.
type probeFlags struct {
	engine, address, model, answers, listen, messageFile, modelDigest string
	tlsCAFile, tlsServerName                                          string
	ranks                                                             int
	record, check                                                     bool
}

func newProbeCommand() *cobra.Command {
	var flags probeFlags
	command := &cobra.Command{
		Use:   "probe --address http://IP:PORT --model-name NAME --ranks N --answers FILE --listen IP:PORT",
		Short: "Compare an engine's outputs with and without a plan, and report readiness",
		Long: "Wait until an engine serves, and compare its outputs for fixed prompts, on every rank, with the outputs recorded without a plan.\n" +
			"GET " + probeReadyPath + " returns 200 after a successful comparison and 503 before. The comparison is repeated after an engine failure.\nRuns until SIGTERM.\n" +
			"With --record, record the outputs of a running engine and exit; with --check, compare once and exit.\n" +
			"Exit codes: 3 the outputs differ, or flags or recorded outputs are invalid, with the reason on one line and in the termination\n" +
			"message; 1 any other error, which a retry may fix.",
		Args: invalidArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			err := runProbe(cli.WithLogger(cmd.Context(), "probe", 0), flags)
			if err == nil {
				return nil
			}
			err = cli.WithCode(errors.New(oneLine(err.Error())), cli.ExitCode(err))
			if writeErr := writeTerminationMessage(flags.messageFile, err.Error()); writeErr != nil {
				cli.PrintError(cmd.ErrOrStderr(), "semmoe", writeErr)
			}
			return err
		},
	}
	command.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return cli.WithCode(err, cli.ExitInvalidFile) })
	f := command.Flags()
	f.StringVar(&flags.engine, "engine", "SGLang", "type of the engine")
	f.StringVar(&flags.address, "address", "", "base URL of the engine (required)")
	f.StringVar(&flags.tlsCAFile, "tls-ca-file", "", "PEM file with the certificate authorities of the engine (default: those of the system)")
	f.StringVar(&flags.tlsServerName, "tls-server-name", "", "name in the certificate of the engine (default: the host of --address)")
	f.StringVar(&flags.model, "model-name", "", "name by which the engine serves the model (required)")
	f.IntVar(&flags.ranks, "ranks", 1, "number of ranks that requests can be pinned to; 1 without rank selection")
	f.StringVar(&flags.answers, "answers", "", "file with the outputs recorded without a plan (required)")
	f.StringVar(&flags.listen, "listen", "", "host:port of the readiness endpoint GET "+probeReadyPath+" (required without --record and --check)")
	f.BoolVar(&flags.record, "record", false, "one recording of the engine's outputs into the file of --answers")
	f.BoolVar(&flags.check, "check", false, "one comparison of the engine's outputs")
	f.StringVar(&flags.modelDigest, "model-digest", "", "digest of the engine's checkpoint, from semmoe inspect (required with --record)")
	f.StringVar(&flags.messageFile, "termination-message", "", "file for the termination message (default "+terminationLog+", if it exists)")
	return command
}

// runProbe returns nil when ctx ends.
func runProbe(ctx context.Context, flags probeFlags) error {
	debug.SetMemoryLimit(probeMemory)
	adapter, err := flags.validate()
	if err != nil {
		return cli.WithCode(err, cli.ExitInvalidFile)
	}
	client := &probe.Client{Address: flags.baseURL(), Model: flags.model}
	if flags.tlsCAFile != "" || flags.tlsServerName != "" {
		files, err := tlsfiles.New("", "", flags.tlsCAFile)
		if err != nil {
			return fmt.Errorf("--tls-ca-file: %w", err) // a Secret that is corrected needs only another attempt
		}
		client.HTTP = probe.NewTLSClient(func() (*tls.Config, error) { return files.Client(flags.tlsServerName) })
	}
	if flags.record {
		return recordAnswers(ctx, client, flags)
	}
	answers, err := probe.Read(flags.answers)
	if err != nil {
		return cli.WithCode(err, cli.ExitInvalidFile)
	}
	if flags.check {
		return differs(probe.Check(ctx, client, answers, flags.ranks, adapter.RankHeader))
	}
	probe := probe.NewProbe(client, adapter.HealthPath, answers, flags.ranks, adapter.RankHeader)
	listener, err := net.Listen("tcp", joinIP(flags.listen))
	if err != nil {
		return fmt.Errorf("--listen: %w", err)
	}
	routes := http.NewServeMux()
	routes.Handle("GET "+probeReadyPath, probe)
	server := httpserver.NewProbes(routes, logr.FromContextOrDiscard(ctx))
	defer server.Close()
	go server.Serve(listener) //nolint:errcheck // it ends with Close

	err = differs(probe.Run(ctx))
	if ctx.Err() != nil && cli.ExitCode(err) != cli.ExitInvalidFile {
		return nil
	}
	return err
}

// differs adds the exit code to a difference of outputs.
func differs(err error) error {
	var difference *probe.DifferenceError
	if errors.As(err, &difference) {
		return cli.WithCode(fmt.Errorf("the outputs differ from those recorded without a plan: %w", err), cli.ExitInvalidFile)
	}
	return err
}

// recordAnswers records the current outputs of an engine.
func recordAnswers(ctx context.Context, client *probe.Client, flags probeFlags) error {
	recorded, err := probe.Record(ctx, client, flags.modelDigest)
	if err != nil {
		return err
	}
	text, err := recorded.Encode()
	if err != nil {
		return err
	}
	return atomicfile.WriteBytes(flags.answers, 0o644, text)
}

// validate checks the flags and returns the adapter of the engine type.
func (f probeFlags) validate() (adapter engine.Adapter, err error) {
	if f.record && f.check {
		return adapter, errors.New("--record and --check are mutually exclusive")
	}
	for _, flag := range []struct {
		name, value string
		required    bool
	}{
		{"address", f.address, true}, {"model-name", f.model, true}, {"answers", f.answers, true},
		{"listen", f.listen, !f.record && !f.check}, {"model-digest", f.modelDigest, f.record},
	} {
		if flag.required && flag.value == "" {
			return adapter, fmt.Errorf("--%s is missing", flag.name)
		}
	}
	if f.record {
		if _, err := artifact.ParseDigest(f.modelDigest); err != nil {
			return adapter, fmt.Errorf("--model-digest: %w", err)
		}
	}
	if f.ranks < 1 || f.ranks > 1<<16 {
		return adapter, fmt.Errorf("--ranks is %d; allowed is 1 to %d", f.ranks, 1<<16)
	}
	if adapter, err = registry.For(f.engine); err != nil {
		return adapter, fmt.Errorf("--engine: %w", err)
	}
	if u, err := url.Parse(f.baseURL()); err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		return adapter, fmt.Errorf("--address is %q; want http://host:port", f.address)
	}
	return adapter, nil
}

func (f probeFlags) baseURL() string { return strings.TrimSuffix(joinURL(f.address), "/") }
