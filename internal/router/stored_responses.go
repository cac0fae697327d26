// SPDX-License-Identifier: Apache-2.0

package router

import (
	"context"
	"io"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/util/cache"

	"github.com/semmoe/operator/internal/router/wire"
)

const (
	// maxStoredResponses bounds the memory of a router for stored responses: about 8 MiB.
	maxStoredResponses = 16 << 10
	// storedResponseAge is the time after which a router forgets the pod of a response. It then asks the pods.
	storedResponseAge = time.Hour
	// responseLookupTimeout bounds the question to a pod whether it has a response.
	responseLookupTimeout = 2 * time.Second
	// maxLookupEndpoints is the maximum number of servers that are asked for a response. maxLookups is the maximum number
	// of questions at a time, of all requests.
	maxLookupEndpoints, maxLookups = 256, 32
)

// storedResponses finds the pods that have stored responses (OpenAI's Responses API): an engine stores a response in
// the memory of the server that has generated it. A router remembers the servers of the responses that it has passed
// on. It asks the engines for others, such as those of another router, because the id of a response names no server.
type storedResponses struct {
	pool      *Pool
	transport http.RoundTripper
	servers   *cache.LRUExpireCache // endpoints by id
	lookups   chan struct{}
}

func newStoredResponses(pool *Pool, transport http.RoundTripper) *storedResponses {
	return &storedResponses{pool: pool, transport: transport, servers: cache.NewLRUExpireCache(maxStoredResponses), lookups: make(chan struct{}, maxLookups)}
}

// storedID matches the ids of responses that are looked up.
var storedID = regexp.MustCompile(`^[A-Za-z0-9_-]{1,128}$`)

// neededID returns the id of the stored response that a request refers to; empty if it refers to none.
func neededID(path string, body wire.Body) string {
	id := ""
	if rest, found := strings.CutPrefix(path, wire.ResponsesPath+"/"); found {
		if id, _, _ = strings.Cut(rest, "/"); id == "render" {
			return ""
		}
	} else if path == wire.ResponsesPath {
		id = body.PreviousResponse()
	}
	if !storedID.MatchString(id) {
		return ""
	}
	return id
}

// responseID matches the id of a response at the beginning of the response or of its first event.
var responseID = regexp.MustCompile(`"id"\s*:\s*"(resp_[A-Za-z0-9_-]{1,123})"`)

// learn remembers the server of a response once its first bytes are read.
func (s *storedResponses) learn(path string, response *http.Response, endpoint string) {
	if path == wire.ResponsesPath && response.StatusCode == http.StatusOK {
		response.Body = &namedBody{ReadCloser: response.Body, learn: func(begin []byte) {
			if id := responseID.FindSubmatch(begin); id != nil {
				s.servers.Add(string(id[1]), endpoint, storedResponseAge)
			}
		}}
	}
}

// namedBody calls learn with the first bytes of a body.
type namedBody struct {
	io.ReadCloser
	learn func(begin []byte) // nil once it was called
}

func (b *namedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if n > 0 && b.learn != nil {
		b.learn(p[:n])
		b.learn = nil
	}
	return n, err
}

// server returns the server that has a response. found is false if no server has it, or if there is only one: any server
// can then answer the request.
func (s *storedResponses) server(ctx context.Context, id string, header http.Header) (endpoint string, found bool) {
	servers := s.pool.servers()
	if len(servers) < 2 {
		return "", false
	}
	if known, ok := s.servers.Get(id); ok && slices.ContainsFunc(servers, func(s engineServer) bool { return s.endpoint == known }) {
		return known.(string), true
	}
	if endpoint = s.ask(ctx, id, header, servers[:min(len(servers), maxLookupEndpoints)]); endpoint == "" {
		return "", false
	}
	s.servers.Add(id, endpoint, storedResponseAge)
	return endpoint, true
}

// ask returns the first server that answers that it has a response; empty if there is none.
func (s *storedResponses) ask(ctx context.Context, id string, header http.Header, servers []engineServer) string {
	ctx, cancel := context.WithTimeout(ctx, responseLookupTimeout)
	defer cancel()
	found := make(chan string, len(servers))
	var asked sync.WaitGroup
	for _, server := range servers {
		asked.Go(func() {
			select {
			case s.lookups <- struct{}{}:
				defer func() { <-s.lookups }()
			case <-ctx.Done():
				return
			}
			if s.has(ctx, server, id, header) {
				found <- server.endpoint
				cancel()
			}
		})
	}
	asked.Wait()
	select {
	case endpoint := <-found:
		return endpoint
	default:
		return ""
	}
}

// has reports whether a server has a response, with the credentials of the client.
func (s *storedResponses) has(ctx context.Context, server engineServer, id string, header http.Header) bool {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, server.scheme+"://"+server.endpoint+wire.ResponsesPath+"/"+id, http.NoBody)
	if err != nil {
		return false
	}
	for _, name := range []string{"Authorization", "X-Api-Key"} {
		if values := header[name]; values != nil {
			request.Header[name] = values
		}
	}
	response, err := s.transport.RoundTrip(request)
	if err != nil {
		return false
	}
	defer response.Body.Close()
	io.Copy(io.Discard, io.LimitReader(response.Body, maxRefusalBytes)) //nolint:errcheck // keeps the connection if the response is small
	return response.StatusCode == http.StatusOK
}
