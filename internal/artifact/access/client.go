// SPDX-License-Identifier: Apache-2.0

package access

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/transport"
	"k8s.io/client-go/util/cert"

	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/files/regularfile"
)

// Config configures a client.
type Config struct {
	// URL is the address of the store: https://host:port.
	URL string
	// CAFile is the path of the CA certificates of the store, as PEM. CA contains the certificates directly. If CA is
	// set, CAFile is not read.
	CAFile string
	CA     []byte
	// TokenFile is the path of the service account token with the audience Audience. It is reread when the kubelet
	// renews the token.
	TokenFile string
	// RetryFor limits the time of retries if the store is unreachable or cannot respond. 0 disables retries. The end of
	// the context also ends retries.
	RetryFor time.Duration
	// Dial, if set, replaces the default dialer.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
}

// pool returns the CA certificates of the store.
func (c Config) pool() (*x509.CertPool, error) {
	if len(c.CA) == 0 {
		if err := regularfile.Check(c.CAFile); err != nil {
			return nil, fmt.Errorf("CA file of the artifact store: %w", err)
		}
		pool, err := cert.NewPool(c.CAFile)
		if err != nil {
			return nil, fmt.Errorf("CA file of the artifact store: %w", err)
		}
		return pool, nil
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(c.CA) {
		return nil, errors.New("CA of the artifact store: no certificate found")
	}
	return pool, nil
}

// Client is a client of the store. It is safe for concurrent use.
type Client struct {
	base     string
	http     *http.Client
	retryFor time.Duration
}

// NewClient returns a client. An error names the invalid field.
func NewClient(c Config) (*Client, error) {
	address, err := url.Parse(c.URL)
	if err != nil || address.Scheme != "https" || address.Host == "" {
		return nil, fmt.Errorf("URL of the artifact store: %q is invalid: must be https://host:port", c.URL)
	}
	pool, err := c.pool()
	if err != nil {
		return nil, err
	}
	if err := regularfile.Check(c.TokenFile); err != nil {
		return nil, fmt.Errorf("token file of the artifact store: %w", err)
	}
	authorized, err := transport.NewBearerAuthWithRefreshRoundTripper("", c.TokenFile, &http.Transport{
		Proxy:           http.ProxyFromEnvironment,
		DialContext:     c.Dial,
		TLSClientConfig: &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS13},
		// With Expect: 100-continue, an error response arrives before the body is sent.
		ExpectContinueTimeout: 10 * time.Second,
		TLSHandshakeTimeout:   10 * time.Second,
		ResponseHeaderTimeout: 2 * time.Minute, // the store responds to an upload after it is on disk
		IdleConnTimeout:       30 * time.Second,
	})
	if err != nil {
		return nil, fmt.Errorf("token file of the artifact store: %w", err)
	}
	return &Client{
		base:     strings.TrimSuffix(c.URL, "/") + "/v1/",
		http:     &http.Client{Transport: authorized, CheckRedirect: refuseRedirect},
		retryFor: c.RetryFor,
	}, nil
}

// refuseRedirect disables redirects. The store never redirects, and a token must not be sent to another server.
func refuseRedirect(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }

// Put stores the remaining bytes of r and returns their digest. It reads them twice: directly if r is a file or in
// memory, else from a temporary copy. Storing an existing artifact is no error, and repairs the artifact if its bytes
// are damaged.
func (c *Client) Put(ctx context.Context, scope artifact.Scope, r io.Reader) (artifact.Digest, error) {
	if err := scope.Validate(); err != nil {
		return "", err
	}
	source, ok := r.(interface {
		io.ReaderAt
		io.ReadSeeker
	})
	if !ok {
		file, err := spool(r)
		if err != nil {
			return "", err
		}
		defer file.Close()
		source = file
	}
	start, err := source.Seek(0, io.SeekCurrent)
	if err != nil {
		return "", err
	}
	digest, size, err := artifact.DigestOf(source)
	if err != nil {
		return "", fmt.Errorf("failed to read the artifact: %w", err)
	}
	err = c.doJSON(ctx, func() (*http.Request, error) {
		// The transport may still read the body of a failed attempt, so attempts must not share a read position.
		body := io.NewSectionReader(source, start, size)
		request, err := http.NewRequestWithContext(ctx, http.MethodPut, c.artifact(scope, digest), body)
		if err != nil {
			return nil, err
		}
		request.ContentLength = size
		if size == 0 {
			request.Body = http.NoBody
		}
		request.Header.Set("Content-Type", "application/octet-stream")
		request.Header.Set("Expect", "100-continue")
		return request, nil
	}, nil)
	if err != nil {
		return "", err
	}
	return digest, nil
}

// spool copies r to a temporary file and unlinks the file, so that it is removed in all cases.
func spool(r io.Reader) (*os.File, error) {
	file, err := os.CreateTemp("", "artifact-")
	if err != nil {
		return nil, err
	}
	os.Remove(file.Name())
	if _, err := io.Copy(file, r); err != nil {
		file.Close()
		return nil, fmt.Errorf("failed to read the artifact: %w", err)
	}
	if _, err := file.Seek(0, io.SeekStart); err != nil {
		file.Close()
		return nil, err
	}
	return file, nil
}

// Get opens an artifact. Its bytes are verified only after they are read up to io.EOF. If they do not match the digest,
// the reader returns ErrCorrupt instead of io.EOF. If the connection fails, it returns ErrInterrupted. The caller must
// close the reader.
func (c *Client) Get(ctx context.Context, scope artifact.Scope, digest artifact.Digest) (io.ReadCloser, error) {
	response, err := c.do(ctx, c.request(ctx, http.MethodGet, c.artifact(scope, digest), nil))
	if err != nil {
		return nil, err
	}
	return struct {
		io.Reader
		io.Closer
	}{artifact.Verified(responseBody{response.Body}, digest), response.Body}, nil
}

// responseBody is a response body that wraps read errors in ErrInterrupted.
type responseBody struct{ io.Reader }

func (a responseBody) Read(p []byte) (int, error) {
	n, err := a.Reader.Read(p)
	if err != nil && err != io.EOF {
		err = fmt.Errorf("%w: %w", artifact.ErrInterrupted, err)
	}
	return n, err
}

// Delete deletes an artifact that List returned. If the artifact was stored again in the meantime, Delete returns
// ErrConflict. If the artifact is the result of its scope, the result is deleted, too. Only the manager is allowed to
// delete.
func (c *Client) Delete(ctx context.Context, a artifact.Artifact) error {
	query := url.Values{"modified": {a.Modified.Format(time.RFC3339Nano)}}
	return c.doJSON(ctx, c.request(ctx, http.MethodDelete, c.artifact(a.Scope, a.Digest)+"?"+query.Encode(), nil), nil)
}

// List returns the artifacts of a scope. It is empty if there are none.
func (c *Client) List(ctx context.Context, scope artifact.Scope) ([]artifact.Artifact, error) {
	var list artifact.List
	err := c.doJSON(ctx, c.request(ctx, http.MethodGet, c.base+scope.String()+"/artifacts", nil), &list)
	return list.Artifacts, err
}

// ListAll returns the artifacts of all scopes. Only the manager is allowed to call it.
func (c *Client) ListAll(ctx context.Context) ([]artifact.Artifact, error) {
	var list artifact.List
	err := c.doJSON(ctx, c.request(ctx, http.MethodGet, c.base+"artifacts", nil), &list)
	return list.Artifacts, err
}

// Publish makes an artifact the result of its scope, unless the scope already has a result. It returns the digest of
// the scope's result.
func (c *Client) Publish(ctx context.Context, scope artifact.Scope, digest artifact.Digest) (artifact.Digest, error) {
	body, err := json.Marshal(artifact.Result{Digest: digest})
	if err != nil {
		return "", err
	}
	var won artifact.Result
	err = c.doJSON(ctx, c.request(ctx, http.MethodPut, c.base+scope.String()+"/result", body), &won)
	return won.Digest, err
}

// Published returns the digest of the result of a scope, or ErrNotFound.
func (c *Client) Published(ctx context.Context, scope artifact.Scope) (artifact.Digest, error) {
	var result artifact.Result
	err := c.doJSON(ctx, c.request(ctx, http.MethodGet, c.base+scope.String()+"/result", nil), &result)
	return result.Digest, err
}

func (c *Client) artifact(scope artifact.Scope, digest artifact.Digest) string {
	return c.base + scope.String() + "/artifacts/" + string(digest)
}

// request returns a function that creates the request of each attempt.
func (c *Client) request(ctx context.Context, method, url string, body []byte) func() (*http.Request, error) {
	return func() (*http.Request, error) {
		return http.NewRequestWithContext(ctx, method, url, bytes.NewReader(body))
	}
}

// maxResponseBytes limits a JSON response. It is enough for a list of about 200,000 artifacts.
const maxResponseBytes = 64 << 20

// doJSON sends a request. If into is not nil, it decodes the response into it.
func (c *Client) doJSON(ctx context.Context, request func() (*http.Request, error), into any) error {
	response, err := c.do(ctx, request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if into == nil {
		return nil
	}
	if err := json.NewDecoder(io.LimitReader(responseBody{response.Body}, maxResponseBytes)).Decode(into); err != nil {
		return fmt.Errorf("failed to decode the response of the artifact store: %w", err)
	}
	return nil
}

// do sends a request, and retries temporary errors until RetryFor has passed. All requests of the protocol are
// idempotent, so that a lost response is harmless.
func (c *Client) do(ctx context.Context, request func() (*http.Request, error)) (*http.Response, error) {
	backoff := wait.Backoff{Duration: 100 * time.Millisecond, Factor: 2, Jitter: 0.2, Steps: 8, Cap: 10 * time.Second}
	deadline := time.Now().Add(c.retryFor)
	for {
		response, err := c.attempt(request)
		var status *artifact.StatusError
		if err == nil || errors.As(err, &status) && !temporary(status) {
			return response, err
		}
		pause := backoff.Step()
		if time.Now().Add(pause).After(deadline) {
			return nil, err
		}
		select {
		case <-ctx.Done():
			return nil, errors.Join(ctx.Err(), err)
		case <-time.After(pause):
		}
	}
}

func (c *Client) attempt(request func() (*http.Request, error)) (*http.Response, error) {
	r, err := request()
	if err != nil {
		return nil, err
	}
	response, err := c.http.Do(r)
	if err != nil {
		return nil, err
	}
	if response.StatusCode < 300 {
		return response, nil
	}
	defer response.Body.Close()
	return nil, statusError(response)
}

func statusError(response *http.Response) error {
	var body struct {
		Error string `json:"error"`
	}
	// A response of a proxy, or to a HEAD request, has no JSON body. Then the status is the message.
	data, _ := io.ReadAll(io.LimitReader(response.Body, 64<<10))
	if json.Unmarshal(data, &body) != nil || body.Error == "" {
		body.Error = response.Status
	}
	return &artifact.StatusError{Code: response.StatusCode, Message: body.Error}
}

// temporary reports whether a retry of the same request can succeed after an error response. A full store is not a
// temporary error, because a user must enlarge the store.
func temporary(e *artifact.StatusError) bool {
	return e.Code == http.StatusTooManyRequests || e.Code == http.StatusRequestTimeout || e.Code >= 500 && e.Code != http.StatusInsufficientStorage
}
