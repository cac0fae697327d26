// SPDX-License-Identifier: Apache-2.0

package router

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	processingv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"

	"github.com/semmoe/operator/internal/engine/registry"
	"github.com/semmoe/operator/internal/router/discovery"
	"github.com/semmoe/operator/internal/router/picker"
	"github.com/semmoe/operator/internal/router/picker/gatewaytest"
	"github.com/semmoe/operator/internal/router/plans/planstest"
	"github.com/semmoe/operator/test/load"
	"github.com/semmoe/operator/test/tier"
)

// attackSeconds is the duration of each attack on a router's memory, with the latencies of honest clients compared; 0 for
// a short attack without the comparison.
var attackSeconds = tier.Choose(0, 0, 60)

const (
	// attackedProcess is the environment variable that makes the test binary run as a router process. The memory of
	// that process is measured separately from the memory of its attackers.
	attackedProcess = "SEMMOE_ATTACKED_ROUTER"
	// maxResidentMiB is far below the memory limit of 1 GiB of a router. maxExhaustedMiB is below it: complete requests
	// may hold the whole budget of 384 MiB, and a garbage collection begins at twice of what is held. The same holds for
	// streams that arrive faster than they are refused.
	maxResidentMiB, maxExhaustedMiB = 400, 700
)

// attacked contains the listening addresses of the process and the address of its engine.
type attacked struct{ Clients, Gateways, Engine string }

// TestMain runs as the attacked process if the environment variable is set.
func TestMain(m *testing.M) {
	if engineAddress := os.Getenv(attackedProcess); engineAddress != "" {
		if err := serveAttacked(engineAddress); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// raceDetector reports whether this test was built with the race detector.
func raceDetector() bool {
	build, ok := debug.ReadBuildInfo()
	return ok && slices.Contains(build.Settings, debug.BuildSetting{Key: "-race", Value: "true"})
}

// serveAttacked serves a proxy and an endpoint picker with the limits of semmoe router until its standard input ends.
func serveAttacked(engineAddress string) error {
	adapter, err := registry.For("SGLang")
	if err != nil {
		return err
	}
	options := Options{
		ProxyOptions: ProxyOptions{
			RankHeader: adapter.RankHeader, RoutedExperts: adapter.RoutedExperts, SamplePercent: 100, MaxBodyBytes: 32 << 20,
			EndpointWait: 10 * time.Second, ClientTimeout: time.Minute,
		},
		Host: "127.0.0.1",
	}
	pool := NewPool()
	pool.Set(options.backends([]discovery.Backend{{Pod: "engine", Address: engineAddress, Ranks: 4, Shape: &planstest.Shape}}))
	proxy, _, err := newFrontend(pool, prometheus.NewRegistry(), logr.Discard(), options)
	if err != nil {
		return err
	}
	if options.EndpointPicker, err = attackedPicker(); err != nil {
		return err
	}
	gateways, _, err := newFrontend(pool, prometheus.NewRegistry(), logr.Discard(), options)
	if err != nil {
		return err
	}
	go proxy.Serve()    //nolint:errcheck // runs until the process ends
	go gateways.Serve() //nolint:errcheck // runs until the process ends
	proxy.SetReady(true)
	gateways.SetReady(true)
	if err := json.NewEncoder(os.Stdout).Encode(attacked{Clients: proxy.Addr().String(), Gateways: gateways.Addr().String()}); err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

func attackedPicker() (*EndpointPickerOptions, error) {
	config, err := picker.TLSConfig("", "", "")
	return &EndpointPickerOptions{TLS: config}, err
}

// startAttacked starts the process. It returns the addresses of the process and a function that returns its peak
// memory.
func startAttacked(t *testing.T) (attacked, func() int) {
	t.Helper()
	engine := newEngine(t, "engine", 4, attackedEngine)
	command := exec.Command(os.Args[0])
	command.Env = append(os.Environ(), attackedProcess+"="+engine.Address, "GOMEMLIMIT=off", "GOGC=100")
	command.Stderr = os.Stderr
	input, err := command.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	output, err := command.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		input.Close()
		if err := command.Wait(); err != nil {
			t.Errorf("the attacked router has ended: %v", err)
		}
	})
	var addresses attacked
	if err := json.NewDecoder(output).Decode(&addresses); err != nil {
		t.Fatal(err)
	}
	return addresses, func() int { return peakMiB(t, command.Process.Pid) }
}

// peakMiB returns the peak resident memory of a process.
func peakMiB(t *testing.T, process int) int {
	t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", process))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(status)) {
		if text, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			kib, err := strconv.Atoi(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(text), "kB")))
			if err != nil {
				t.Fatal(err)
			}
			return kib >> 10
		}
	}
	t.Fatalf("no VmHWM in %q", status)
	return 0
}

// attackedEngine answers immediately, or without end if the prompt asks for that.
func attackedEngine(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	if !bytes.Contains(body, []byte("endless")) {
		fmt.Fprint(w, `{"choices":[{"text":"ok"}]}`)
		return
	}
	if bytes.Contains(body, []byte("stream")) {
		w.Header().Set("Content-Type", "text/event-stream")
		fmt.Fprint(w, "data: ")
	}
	piece := bytes.Repeat([]byte("a"), 64<<10)
	for r.Context().Err() == nil {
		if _, err := w.Write(piece); err != nil {
			return
		}
	}
}

// attack is a load that would use unbounded memory without limits. It runs until the context ends, and calls reached
// when its full load is established.
type attack func(ctx context.Context, t *testing.T, to attacked, reached func())

var attacks = map[string]attack{
	"unfinished messages on one connection":      unfinishedMessages(1, 60, 33<<20),
	"unfinished messages on many connections":    unfinishedMessages(30, 10, 16<<20),
	"streams that begin and send nothing":        unfinishedMessages(20, 400, 0),
	"streams of many connections":                unfinishedMessages(60, 1000, 0),
	"headers without end":                        headers("X-Long: "+strings.Repeat("a", 8<<10)+"\r\n", 900<<10),
	"headers of empty lines":                     headers(strings.Repeat("%x:\r\n", 8), 60<<10),
	"bodies that stop before their end":          slowBodies(1000, 4<<20),
	"connections that send nothing":              slowBodies(6000, -1),
	"answers without end":                        endlessAnswers(8, `{"prompt":"endless"}`),
	"lines of a stream without end":              endlessAnswers(8, `{"prompt":"endless stream","stream":true}`),
	"streams that are reset as soon as opened":   rapidResets(4),
	"large answers that a gateway does not read": unread(4, 40, func() []byte { return gatewayAnswer(8 << 20) }),
	"requests that are not read back":            unread(4, 6, func() []byte { return gatewayPost(30<<20, gatewaytest.FullDuplex) }),
	"requests in one piece that are not read":    unread(4, 6, func() []byte { return gatewayPost(30<<20, buffered) }),
}

// exhausting are attacks by a gateway that fills the budget with complete messages. Requests of other gateways may be
// refused at the same time.
var exhausting = map[string]bool{
	"large answers that a gateway does not read": true, "requests that are not read back": true, "requests in one piece that are not read": true,
}

// buffered selects bodies in one message.
var buffered = &extprocv3.ProtocolConfiguration{RequestBodyMode: processingv3.ProcessingMode_BUFFERED, ResponseBodyMode: processingv3.ProcessingMode_BUFFERED}

// floods are attacks that open more connections or streams than the router admits. While they start, an honest client
// that is slower than all of them may lose its place, and repeats its request. Once they are established, they lose theirs
// to honest clients.
var floods = map[string]bool{"streams of many connections": true, "streams that begin and send nothing": true, "connections that send nothing": true}

// crowds are attacks that open more connections to the proxy than it admits, and fill them slowly. A client whose request
// arrives after all of them have opened theirs may lose its new connection, and repeats its request.
var crowds = map[string]bool{"headers without end": true, "headers of empty lines": true, "connections that send nothing": true}

// nightlyAttacks are the attacks that take longest. The commit tier has others on headers, unfinished messages, streams and
// complete messages that are not read.
var nightlyAttacks = map[string]bool{
	"large answers that a gateway does not read": true, "headers of empty lines": true, "streams of many connections": true,
	"unfinished messages on many connections": true,
}

// TestMemoryAttacks checks that attacks on the memory of a router leave it below a bound, and that honest clients are
// served during the attacks.
func TestMemoryAttacks(t *testing.T) {
	if raceDetector() {
		t.Skip("the race detector takes several times the memory: make test runs this test without it")
	}
	for name, attack := range attacks {
		t.Run(name, func(t *testing.T) {
			if nightlyAttacks[name] {
				tier.Nightly(t)
			}
			to, peak := startAttacked(t)
			honest := newHonestClients(t, to)
			honest.skipsGateway, honest.repeats, honest.reconnects = exhausting[name], floods[name], crowds[name]
			var before []time.Duration
			if attackSeconds > 0 {
				before = honest.requestFor(time.Duration(attackSeconds) * time.Second)
			}
			ctx, stop := context.WithCancel(t.Context())
			defer stop()
			reached := make(chan struct{})
			var running sync.WaitGroup
			running.Go(func() { attack(ctx, t, to, sync.OnceFunc(func() { close(reached) })) })
			var during []time.Duration
			if floods[name] {
				<-reached
			}
			for loaded := false; !loaded; {
				during = append(during, honest.request())
				select {
				case <-reached:
					loaded = true
				default:
				}
			}
			if attackSeconds > 0 {
				during = append(during, honest.requestFor(time.Duration(attackSeconds)*time.Second)...)
			}
			for range 20 {
				during = append(during, honest.request())
			}
			stop()
			running.Wait()
			limit := maxResidentMiB
			if exhausting[name] || name == "streams of many connections" {
				limit = maxExhaustedMiB
			}
			if got := peak(); got >= limit {
				t.Errorf("the router takes up to %d MiB, want less than %d", got, limit)
			} else {
				t.Logf("up to %d MiB, %d honest requests at the same time", got, len(during))
			}
			if before != nil {
				normal, attacked := percentile99(before), percentile99(during)
				t.Logf("p99 of honest requests: %v before, %v during the attack", normal, attacked)
				// Below a few milliseconds, the noise of the machine dominates.
				if attacked > 3*max(normal, 5*time.Millisecond) {
					t.Errorf("p99 of honest requests is %v during the attack, %v before: want at most 3 times as much", attacked, normal)
				}
			}
		})
	}
}

func percentile99(times []time.Duration) time.Duration {
	times = slices.Sorted(slices.Values(times))
	return times[len(times)*99/100]
}

// honestClients use the router as clients and gateways do.
type honestClients struct {
	t       *testing.T
	to      attacked
	http    *http.Client
	gateway extprocv3.ExternalProcessorClient
	// skipsGateway is true if only the proxy must serve.
	skipsGateway bool
	// repeats is true if the gateway repeats a request that is refused, as long as streams of the attack are.
	repeats bool
	// reconnects is true if the client repeats a request whose new connection is closed.
	reconnects bool
}

func newHonestClients(t *testing.T, to attacked) *honestClients {
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	return &honestClients{
		t: t, to: to, http: &http.Client{Transport: transport, Timeout: load.Scale(time.Minute)},
		gateway: extprocv3.NewExternalProcessorClient(gatewaytest.Dial(t, to.Gateways)),
	}
}

// request sends one request to the proxy and one to the picker, requires that both are served, and returns their time.
func (h *honestClients) request() time.Duration {
	h.t.Helper()
	start := time.Now()
	body := `{"prompt":"` + strings.Repeat("word ", 200) + `","max_tokens":1}`
	var clock load.Clock
	err := h.post(body)
	for lost := new(url.Error); h.reconnects && errors.As(err, &lost) && clock.Elapsed() < time.Minute; {
		err = h.post(body)
	}
	if err != nil {
		h.t.Fatalf("an honest request: %v", err)
	}
	if h.skipsGateway {
		return time.Since(start)
	}
	ctx, cancel := context.WithTimeout(h.t.Context(), load.Scale(time.Minute))
	defer cancel()
	for h.repeats {
		err := h.ask(ctx)
		if err == nil {
			return time.Since(start)
		}
		if ctx.Err() != nil {
			h.t.Fatalf("an honest gateway: %v", err)
		}
	}
	stream, err := h.gateway.Process(ctx)
	if err != nil {
		h.t.Fatalf("an honest gateway: %v", err)
	}
	gateway := gatewaytest.Of(h.t, stream, gatewaytest.FullDuplex)
	gateway.RequestHeaders("POST", "/v1/completions", map[string]string{"content-length": strconv.Itoa(len(body))}, false, nil)
	gateway.RequestBody([]byte(body), 64<<10, true)
	gateway.Picked()
	gateway.Body(-1)
	gateway.ResponseHeaders(200, nil, true, "")
	gateway.Answered()
	if err := gateway.End(); err != io.EOF {
		h.t.Fatalf("an honest gateway's stream ends with %v", err)
	}
	return time.Since(start)
}

// post sends a request to the proxy, and returns an error unless it is served.
func (h *honestClients) post(body string) error {
	// The router may close an idle connection to make room. The client then resends its request, which HTTP allows
	// here.
	request, err := http.NewRequest(http.MethodPost, "http://"+h.to.Clients+"/v1/completions", strings.NewReader(body))
	if err != nil {
		return err
	}
	request.Header.Set("Idempotency-Key", "1")
	response, err := h.http.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	answer, err := io.ReadAll(response.Body)
	if err == nil && (response.StatusCode != http.StatusOK || !bytes.Contains(answer, []byte("ok"))) {
		err = fmt.Errorf("%s %.200s", response.Status, answer)
	}
	return err
}

// ask sends a request without a body to the picker.
func (h *honestClients) ask(ctx context.Context) error {
	stream, err := h.gateway.Process(ctx)
	if err != nil {
		return err
	}
	defer stream.CloseSend() //nolint:errcheck // its answer has arrived
	header := gatewayHeader(true, ":method", http.MethodGet, ":path", "/v1/models")
	if err := stream.Send(&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestHeaders{RequestHeaders: header}}); err != nil && err != io.EOF {
		return err
	}
	_, err = stream.Recv()
	return err
}

func (h *honestClients) requestFor(duration time.Duration) (times []time.Duration) {
	for end := time.Now().Add(duration); time.Now().Before(end); {
		times = append(times, h.request())
	}
	return times
}

// parallel runs numbered attackers. It calls reached once all of them have reached their load or were disconnected.
func parallel(attackers int, reached func(), attacker func(number int, reached func())) {
	var left atomic.Int64
	left.Store(int64(attackers))
	var all sync.WaitGroup
	for number := range attackers {
		all.Go(func() {
			done := sync.OnceFunc(func() {
				if left.Add(-1) == 0 {
					reached()
				}
			})
			defer done()
			attacker(number, done)
		})
	}
	all.Wait()
}

// rawHTTP2 opens a connection for sending HTTP/2 frames.
func rawHTTP2(ctx context.Context, address string) (net.Conn, *http2.Framer, error) {
	dialer := tls.Dialer{Config: &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}}}
	connection, err := dialer.DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, nil, err
	}
	framer := http2.NewFramer(connection, connection)
	_, err = io.WriteString(connection, http2.ClientPreface)
	return connection, framer, errors.Join(err, framer.WriteSettings())
}

// openStream sends the header of a call to the picker.
func openStream(framer *http2.Framer, id uint32) error {
	var block bytes.Buffer
	encoder := hpack.NewEncoder(&block)
	for _, field := range [][2]string{
		{":method", "POST"}, {":scheme", "https"}, {":authority", "x"}, {":path", extprocv3.ExternalProcessor_Process_FullMethodName},
		{"content-type", "application/grpc"}, {"te", "trailers"},
	} {
		if err := encoder.WriteField(hpack.HeaderField{Name: field[0], Value: field[1]}); err != nil {
			return err
		}
	}
	return framer.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: block.Bytes(), EndHeaders: true})
}

// unfinishedMessages opens streams, each of which sends a message without its last byte, as far as the server accepts
// it.
func unfinishedMessages(connections, streams, size int) attack {
	return func(ctx context.Context, t *testing.T, to attacked, reached func()) {
		parallel(connections, reached, func(_ int, reached func()) {
			connection, framer, err := rawHTTP2(ctx, to.Gateways)
			if err != nil {
				return
			}
			defer connection.Close()
			defer context.AfterFunc(ctx, func() { connection.Close() })()
			prefix := binary.BigEndian.AppendUint32([]byte{0}, uint32(size))
			sender := newWindows(framer)
			go sender.read(connection)
			left := map[uint32]int{}
			for i := range streams {
				id := uint32(2*i + 1)
				left[id] = len(prefix) + size - 1
				if err := sender.open(id); err != nil {
					return
				}
				if size > 0 && sender.send(id, prefix) != nil {
					return
				}
			}
			piece := make([]byte, 16<<10)
			for idle := 0; size > 0 && idle < 20 && ctx.Err() == nil; {
				sent := 0
				for i := range streams {
					id := uint32(2*i + 1)
					n := sender.room(id, min(len(piece), left[id]))
					if n == 0 || sender.send(id, piece[:n]) != nil {
						continue
					}
					left[id] -= n
					sent += n
				}
				if sent > 0 {
					idle = 0
					continue
				}
				select {
				case <-sender.changed:
				case <-ctx.Done():
				case <-time.After(100 * time.Millisecond): // the server accepts no more
					idle++
				}
			}
			reached()
			<-ctx.Done()
		})
	}
}

// windows are the flow control windows of a connection.
type windows struct {
	mu         sync.Mutex
	framer     *http2.Framer
	connection int64
	stream     map[uint32]int64
	first      int64
	changed    chan struct{}
}

func newWindows(framer *http2.Framer) *windows {
	return &windows{framer: framer, connection: 65535, stream: map[uint32]int64{}, first: 65535, changed: make(chan struct{}, 1)}
}

func (w *windows) open(id uint32) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.stream[id] = w.first
	return openStream(w.framer, id)
}

// room returns how many of these bytes may be sent on a stream.
func (w *windows) room(id uint32, bytes int) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return int(max(0, min(int64(bytes), w.connection, w.stream[id])))
}

var errAcceptsNothing = errors.New("the server accepts nothing")

// sendAll sends the data as the server accepts it, or until the server has ended the stream.
func (w *windows) sendAll(ctx context.Context, id uint32, data []byte) error {
	for len(data) > 0 && w.isOpen(id) {
		if n := w.room(id, min(16<<10, len(data))); n > 0 {
			if err := w.send(id, data[:n]); err != nil {
				return err
			}
			data = data[n:]
			continue
		}
		select {
		case <-w.changed:
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(2 * time.Second):
			return errAcceptsNothing
		}
	}
	return nil
}

func (w *windows) isOpen(id uint32) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	_, open := w.stream[id]
	return open
}

func (w *windows) send(id uint32, data []byte) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.connection -= int64(len(data))
	w.stream[id] -= int64(len(data))
	return w.framer.WriteData(id, false, data)
}

// read processes the frames of the server until the connection ends.
func (w *windows) read(connection net.Conn) {
	reader := http2.NewFramer(nil, bufio.NewReader(connection))
	for {
		frame, err := reader.ReadFrame()
		if err != nil {
			return
		}
		w.mu.Lock()
		switch frame := frame.(type) {
		case *http2.WindowUpdateFrame:
			if frame.StreamID == 0 {
				w.connection += int64(frame.Increment)
			} else if _, open := w.stream[frame.StreamID]; open {
				w.stream[frame.StreamID] += int64(frame.Increment)
			}
		case *http2.SettingsFrame:
			if first, ok := frame.Value(http2.SettingInitialWindowSize); ok {
				for id := range w.stream {
					w.stream[id] += int64(first) - w.first
				}
				w.first = int64(first)
			}
			if !frame.IsAck() {
				w.framer.WriteSettingsAck() //nolint:errcheck // the connection ends
			}
		case *http2.RSTStreamFrame:
			delete(w.stream, frame.StreamID)
		}
		w.mu.Unlock()
		select {
		case w.changed <- struct{}{}:
		default:
		}
	}
}

// headers sends headers of this size that do not end, over 2,500 connections. A verb in the line is replaced by a
// number.
func headers(line string, size int) attack {
	return func(ctx context.Context, t *testing.T, to attacked, reached func()) {
		parallel(2500, reached, func(number int, reached func()) {
			connection, err := (&net.Dialer{}).DialContext(ctx, "tcp", to.Clients)
			if err != nil {
				return
			}
			defer connection.Close()
			defer context.AfterFunc(ctx, func() { connection.Close() })()
			out := bufio.NewWriter(connection)
			fmt.Fprint(out, "POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
			for sent, i := 0, 0; sent < size; {
				text := line
				if verbs := strings.Count(line, "%"); verbs > 0 {
					var numbers []any
					for range verbs {
						numbers = append(numbers, 0x1000+i)
						i++
					}
					text = fmt.Sprintf(line, numbers...)
				}
				n, err := out.WriteString(text)
				if err != nil {
					return
				}
				sent += n
			}
			if out.Flush() != nil {
				return
			}
			reached()
			<-ctx.Done()
		})
	}
}

// slowBodies opens connections that send a body of this size without its last byte, or nothing if size is negative.
func slowBodies(connections, size int) attack {
	return func(ctx context.Context, t *testing.T, to attacked, reached func()) {
		piece := bytes.Repeat([]byte("a"), 64<<10)
		parallel(connections, reached, func(_ int, reached func()) {
			connection, err := (&net.Dialer{}).DialContext(ctx, "tcp", to.Clients)
			if err != nil {
				return
			}
			defer connection.Close()
			defer context.AfterFunc(ctx, func() { connection.Close() })()
			if size >= 0 {
				fmt.Fprintf(connection, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n", size)
			}
			for left := size - 1; left > 0; {
				n, err := connection.Write(piece[:min(left, len(piece))])
				if err != nil {
					return
				}
				left -= n
			}
			reached()
			<-ctx.Done()
		})
	}
}

// endlessAnswers requests endless responses and reads a part of each. The router disconnects a client that reads
// nothing for a minute.
func endlessAnswers(clients int, body string) attack {
	return func(ctx context.Context, t *testing.T, to attacked, reached func()) {
		parallel(clients, reached, func(_ int, reached func()) {
			request, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+to.Clients+"/v1/completions", strings.NewReader(body))
			if err != nil {
				return
			}
			response, err := http.DefaultTransport.RoundTrip(request)
			if err != nil {
				return
			}
			defer response.Body.Close()
			io.CopyN(io.Discard, response.Body, 200<<20) //nolint:errcheck // ends with the attack
			reached()
			<-ctx.Done()
		})
	}
}

// rapidResets opens streams and resets each immediately (CVE-2023-44487), until the server closes the connection.
func rapidResets(connections int) attack {
	return func(ctx context.Context, t *testing.T, to attacked, reached func()) {
		parallel(connections, reached, func(_ int, reached func()) {
			connection, framer, err := rawHTTP2(ctx, to.Gateways)
			if err != nil {
				return
			}
			defer connection.Close()
			defer context.AfterFunc(ctx, func() { connection.Close() })()
			go io.Copy(io.Discard, connection) //nolint:errcheck // until the connection is closed
			for id := uint32(1); id < 40_000; id += 2 {
				if openStream(framer, id) != nil || framer.WriteRSTStream(id, http2.ErrCodeCancel) != nil {
					return
				}
			}
			reached()
		})
	}
}
