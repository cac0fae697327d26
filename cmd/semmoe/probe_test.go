// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/semmoe/operator/cmd/internal/cli"
	"github.com/semmoe/operator/cmd/internal/clitest"
	"github.com/semmoe/operator/internal/model/checkpoint"
	"github.com/semmoe/operator/internal/probe"
	"github.com/semmoe/operator/internal/refengine"
	"github.com/semmoe/operator/internal/router/tlsfiles/tlstest"
	"github.com/semmoe/operator/test/poll"
	"github.com/semmoe/operator/test/ports"
)

// startTiny serves the small model on four ranks, and returns its URL when it serves.
func startTiny(t *testing.T, expertMap, fault string) string {
	t.Helper()
	address := ports.Address(t)
	_, port, err := net.SplitHostPort(address)
	if err != nil {
		t.Fatal(err)
	}
	o := refengine.DefaultOptions()
	o.ModelPath, o.ServedModelName, o.TPSize, o.DPSize, o.EPSize, o.EnableDPAttention = clitest.TinyModel, "tiny", 4, 4, 4, true
	o.InitExpertLocation, o.Fault = cmp.Or(expertMap, o.InitExpertLocation), fault
	if o.Port, err = strconv.Atoi(port); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	var done sync.WaitGroup
	done.Go(func() {
		if err := refengine.Run(ctx, o); err != nil {
			t.Errorf("the engine ended with %v", err)
		}
	})
	t.Cleanup(func() { stop(); done.Wait() })
	url := "http://" + address
	untilOK(t, url+"/health")
	return url
}

// untilOK waits until a URL returns status 200.
func untilOK(t *testing.T, url string) {
	t.Helper()
	poll.Until(t, url+" returns status 200", func() bool {
		response, err := http.Get(url)
		if err != nil {
			return false
		}
		response.Body.Close()
		return response.StatusCode == http.StatusOK
	})
}

// recordTiny records the outputs of the engine without a plan.
func recordTiny(t *testing.T) (path string) {
	t.Helper()
	model, err := checkpoint.Inspect(clitest.TinyModel)
	if err != nil {
		t.Fatal(err)
	}
	path = filepath.Join(t.TempDir(), "answers.json")
	if err := executeProbe(t, "--record", "--address", startTiny(t, "", ""), "--model-name", "tiny", "--model-digest", model.ModelDigest, "--answers", path); err != nil {
		t.Fatal(err)
	}
	return path
}

func executeProbe(t *testing.T, args ...string) error {
	t.Helper()
	command := newProbeCommand()
	command.SilenceErrors, command.SilenceUsage = true, true
	command.SetOut(&bytes.Buffer{})
	command.SetArgs(append(args, "--termination-message", filepath.Join(t.TempDir(), "log")))
	return command.ExecuteContext(t.Context())
}

// tinyMap returns an expert map that shifts the experts of every layer by one rank.
func tinyMap() string {
	row := make([]string, 32)
	for p := range row {
		row[p] = strconv.Itoa((p + 8) % 32)
	}
	list := "[" + strings.Join(row, ",") + "]"
	return fmt.Sprintf(`{"physical_to_logical_map":[%s,%s,%s,%s]}`, list, list, list, list)
}

// shorten keeps the first 16 prompts of recorded answers, for checks that take a quarter of the time.
func shorten(t *testing.T, path string) {
	t.Helper()
	answers, err := probe.Read(path)
	if err != nil {
		t.Fatal(err)
	}
	answers.Prompts = answers.Prompts[:16]
	text, err := answers.Encode()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
}

// TestProbe checks that the command reports equal and different outputs. Package internal/probe compares the outputs of
// all prompts.
func TestProbe(t *testing.T) {
	answers := recordTiny(t)
	shorten(t, answers)
	message := filepath.Join(t.TempDir(), "termination-log")
	start := func(ctx context.Context, engine, listen string) error {
		command := newProbeCommand()
		command.SilenceErrors, command.SilenceUsage = true, true
		command.SetArgs([]string{"--address", engine, "--model-name", "tiny", "--ranks", "4", "--answers", answers, "--listen", listen, "--termination-message", message})
		return command.ExecuteContext(ctx)
	}

	t.Run("planned", func(t *testing.T) {
		engine, listen := startTiny(t, tinyMap(), ""), ports.Address(t)
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		ended := make(chan error, 1)
		go func() { ended <- start(ctx, engine, listen) }()
		untilOK(t, "http://"+listen+"/readyz")
		stop()
		if err := <-ended; err != nil {
			t.Errorf("ended with %v", err)
		}
		if text, err := os.ReadFile(message); !os.IsNotExist(err) {
			t.Errorf("termination message %q, %v", text, err)
		}
	})
	t.Run("checked once", func(t *testing.T) {
		if err := executeProbe(t, "--check", "--address", startTiny(t, "", ""), "--model-name", "tiny", "--ranks", "4", "--answers", answers); err != nil {
			t.Error(err)
		}
	})
	t.Run("TLS", func(t *testing.T) {
		target, err := url.Parse(startTiny(t, "", ""))
		if err != nil {
			t.Fatal(err)
		}
		authority := tlstest.NewAuthority(t)
		certFile, keyFile := authority.Files(t.TempDir(), "m-pods.ns.svc", time.Now().Add(time.Hour))
		certificate, err := tls.LoadX509KeyPair(certFile, keyFile)
		if err != nil {
			t.Fatal(err)
		}
		engine := httptest.NewUnstartedServer(httputil.NewSingleHostReverseProxy(target))
		engine.TLS = &tls.Config{Certificates: []tls.Certificate{certificate}}
		engine.StartTLS()
		defer engine.Close()
		for _, tc := range []struct {
			authority, name string
			proven          bool
		}{{authority.File, "m-pods.ns.svc", true}, {authority.File, "other-pods.ns.svc", false}, {tlstest.NewAuthority(t).File, "m-pods.ns.svc", false}, {"/nonexistent", "m-pods.ns.svc", false}} {
			err := executeProbe(t, "--check", "--address", engine.URL, "--model-name", "tiny", "--ranks", "4", "--answers", answers, "--tls-ca-file", tc.authority, "--tls-server-name", tc.name)
			if (err == nil) != tc.proven || cli.ExitCode(err) == cli.ExitInvalidFile { // outputs of an engine that cannot be verified are not different ones
				t.Errorf("authority %s, name %s: %v", tc.authority, tc.name, err)
			}
		}
	})
	t.Run("map ignored at dispatch", func(t *testing.T) {
		engine := startTiny(t, tinyMap(), refengine.FaultIgnoreMapAtDispatch)
		err := start(t.Context(), engine, ports.Address(t))
		if again := executeProbe(t, "--check", "--address", engine, "--model-name", "tiny", "--ranks", "4", "--answers", answers); again == nil || cli.ExitCode(again) != cli.ExitInvalidFile {
			t.Errorf("single check: %v", again)
		}
		if err == nil || cli.ExitCode(err) != cli.ExitInvalidFile || !strings.Contains(err.Error(), "outputs differ from those recorded without a plan: rank ") || strings.Contains(err.Error(), "\n") {
			t.Fatalf("%v, want exit code %d", err, cli.ExitInvalidFile)
		}
		if text, readErr := os.ReadFile(message); readErr != nil || string(text) != err.Error() {
			t.Errorf("termination message %q, %v", text, readErr)
		}
	})
}

func TestProbeRefuses(t *testing.T) {
	good := []string{"--address", "http://127.0.0.1:1", "--model-name", "m", "--answers", "/nonexistent", "--listen", "127.0.0.1:0"}
	for name, test := range map[string]struct {
		args []string
		want string
	}{
		"no address":       {good[2:], "--address is missing"},
		"no answers":       {append(good, "--answers="), "--answers is missing"},
		"missing answers":  {good, "/nonexistent"},
		"other file":       {append(good, "--answers", clitest.TinyModel+"/config.json"), "config.json: not stored answers"},
		"no listen":        {slices.Clip(good[:6]), "--listen is missing"},
		"no model digest":  {append(good, "--record"), "--model-digest is missing"},
		"model digest":     {append(good, "--record", "--model-digest", "abc"), "--model-digest: "},
		"record and check": {append(good, "--record", "--check"), "mutually exclusive"},
		"no rank":          {append(good, "--ranks", "0"), "--ranks is 0; allowed is 1 to 65536"},
		"ranks are a word": {append(good, "--ranks", "four"), "four"},
		"engine":           {append(good, "--engine", "llama.cpp"), `--engine: engine type "llama.cpp"`},
		"address":          {append(good, "--address", "127.0.0.1:1"), `--address is "127.0.0.1:1"; want http://host:port`},
	} {
		t.Run(name, func(t *testing.T) {
			err := executeProbe(t, test.args...)
			if err == nil || cli.ExitCode(err) != cli.ExitInvalidFile || !strings.Contains(err.Error(), test.want) {
				t.Errorf("%v, want %q and exit code %d", err, test.want, cli.ExitInvalidFile)
			}
		})
	}
}
