package artifact

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

	"github.com/semmoe/operator/internal/regularfile"
)

// Config is where a store is and how to talk to it.
type Config struct {
	// URL is the store's address: https://host:port.
	URL string
	// CAFile holds the certificates, as PEM, that the store's certificate must come from;
	// CA holds them itself; CAFile is not read then.
	CAFile string
	CA     []byte
	// TokenFile holds the service-account token, of audience Audience. It is read anew as the kubelet renews it.
	TokenFile string
	// RetryFor is how long a request is repeated that found the store away or unable to answer; zero means once only.
	// A context that ends earlier ends it.
	RetryFor time.Duration
	// Dial, where set, connects to the store in place of the network's own way.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
}

// pool holds the certificates that the store's must come from.
func (c Config) pool() (*x509.CertPool, error) {
	if len(c.CA) == 0 {
		if err := regularfile.Check(c.CAFile); err != nil {
			return nil, fmt.Errorf("artifact store's CA file: %w", err)
		}
		pool, err := cert.NewPool(c.CAFile)
		if err != nil {
			return nil, fmt.Errorf("artifact store's CA file: %w", err)
		}
		return pool, nil
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(c.CA) {
		return nil, errors.New("artifact store's CA: holds no certificate")
	}
	return pool, nil
}

// Client talks to a store. It may be used concurrently.
type Client struct {
	base     string
	http     *http.Client
	retryFor time.Duration
}

// NewClient makes a client. The errors name the field at fault.
func NewClient(c Config) (*Client, error) {
	address, err := url.Parse(c.URL)
	if err != nil || address.Scheme != "https" || address.Host == "" {
		return nil, fmt.Errorf("artifact store's URL %q: must be https://host:port", c.URL)
	}
	pool, err := c.pool()
	if err != nil {
		return nil, err
	}
	if err := regularfile.Check(c.TokenFile); err != nil {
		return nil, fmt.Errorf("artifact store's token file: %w", err)
	}
	authorized, err := transport.NewBearerAuthWithRefreshRoundTripper("", c.TokenFile, &http.Transport{
		Proxy:           http.ProxyFromEnvironment,
		DialContext:     c.Dial,
		TLSClientConfig: &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS13},
		// A refusal arrives before the body is sent.
		ExpectContinueTimeout: 10 * time.Second,
		TLSHandshakeTimeout:   10 * time.Second,
		ResponseHeaderTimeout: 2 * time.Minute, // the store answers an upload when it is on disk
		IdleConnTimeout:       30 * time.Second,
	})
	if err != nil {
		return nil, fmt.Errorf("artifact store's token file: %w", err)
	}
	return &Client{
		base:     strings.TrimSuffix(c.URL, "/") + "/v1/",
		http:     &http.Client{Transport: authorized, CheckRedirect: refuseRedirect},
		retryFor: c.RetryFor,
	}, nil
}

// refuseRedirect: the store never redirects, and a token must not follow one elsewhere.
func refuseRedirect(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }

// Put stores what is left of r, and returns its digest. It reads it twice: in place where r is a file or in memory, else
// from a temporary copy. To store what is there already is no error, and repairs it where its bytes were damaged.
func (c *Client) Put(ctx context.Context, scope Scope, r io.Reader) (Digest, error) {
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
	digest, size, err := DigestOf(source)
	if err != nil {
		return "", fmt.Errorf("read the artifact: %w", err)
	}
	err = c.doJSON(ctx, func() (*http.Request, error) {
		// The transport may go on reading the body of an attempt that has failed: attempts share no position.
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

// spool copies r to a temporary file that has no name any more, so that nothing is left of it whatever happens.
func spool(r io.Reader) (*os.File, error) {
	file, err := os.CreateTemp("", "artifact-")
	if err != nil {
		return nil, err
	}
	os.Remove(file.Name())
	if _, err := io.Copy(file, r); err != nil {
		file.Close()
		return nil, fmt.Errorf("read the artifact: %w", err)
	}
	if _, err := file.Seek(0, io.SeekStart); err != nil {
		file.Close()
		return nil, err
	}
	return file, nil
}

// Get opens an artifact. Its bytes are the digest's only if they were read up to io.EOF: ErrCorrupt or another error
// comes in its place if they are not, or not all; ErrInterrupted where the rest did not come. The caller closes the reader.
func (c *Client) Get(ctx context.Context, scope Scope, digest Digest) (io.ReadCloser, error) {
	response, err := c.do(ctx, c.request(ctx, http.MethodGet, c.artifact(scope, digest), nil))
	if err != nil {
		return nil, err
	}
	return struct {
		io.Reader
		io.Closer
	}{Verified(answer{response.Body}, digest), response.Body}, nil
}

// answer is the body of an answer, which says of its errors that they are those of the way.
type answer struct{ io.Reader }

func (a answer) Read(p []byte) (int, error) {
	n, err := a.Reader.Read(p)
	if err != nil && err != io.EOF {
		err = fmt.Errorf("%w: %w", ErrInterrupted, err)
	}
	return n, err
}

// Has tells whether an artifact is stored. It does not look at its bytes.
func (c *Client) Has(ctx context.Context, scope Scope, digest Digest) (bool, error) {
	err := c.doJSON(ctx, c.request(ctx, http.MethodHead, c.artifact(scope, digest), nil), nil)
	if errors.Is(err, ErrNotFound) {
		return false, nil
	}
	return err == nil, err
}

// Delete deletes an artifact as List returned it: one that was stored again since stays, with ErrConflict. A result
// that names it goes with it. Only the manager may.
func (c *Client) Delete(ctx context.Context, a Artifact) error {
	query := url.Values{"modified": {a.Modified.Format(time.RFC3339Nano)}}
	return c.doJSON(ctx, c.request(ctx, http.MethodDelete, c.artifact(a.Scope, a.Digest)+"?"+query.Encode(), nil), nil)
}

// List returns the artifacts of a scope, none where there are none.
func (c *Client) List(ctx context.Context, scope Scope) ([]Artifact, error) {
	var list List
	err := c.doJSON(ctx, c.request(ctx, http.MethodGet, c.base+scope.String()+"/artifacts", nil), &list)
	return list.Artifacts, err
}

// ListAll returns the artifacts of all scopes. Only the manager may.
func (c *Client) ListAll(ctx context.Context) ([]Artifact, error) {
	var list List
	err := c.doJSON(ctx, c.request(ctx, http.MethodGet, c.base+"artifacts", nil), &list)
	return list.Artifacts, err
}

// Publish makes an artifact of the scope its result, unless it has one, and returns the digest of the one that it has.
func (c *Client) Publish(ctx context.Context, scope Scope, digest Digest) (Digest, error) {
	body, err := json.Marshal(Result{Digest: digest})
	if err != nil {
		return "", err
	}
	var won Result
	err = c.doJSON(ctx, c.request(ctx, http.MethodPut, c.base+scope.String()+"/result", body), &won)
	return won.Digest, err
}

// Published returns the digest of the scope's result, or ErrNotFound.
func (c *Client) Published(ctx context.Context, scope Scope) (Digest, error) {
	var result Result
	err := c.doJSON(ctx, c.request(ctx, http.MethodGet, c.base+scope.String()+"/result", nil), &result)
	return result.Digest, err
}

func (c *Client) artifact(scope Scope, digest Digest) string {
	return c.base + scope.String() + "/artifacts/" + string(digest)
}

// request returns what makes the request for each attempt.
func (c *Client) request(ctx context.Context, method, url string, body []byte) func() (*http.Request, error) {
	return func() (*http.Request, error) {
		return http.NewRequestWithContext(ctx, method, url, bytes.NewReader(body))
	}
}

// maxAnswerBytes bounds an answer in JSON: a list of some 200,000 artifacts.
const maxAnswerBytes = 64 << 20

// doJSON does a request, and reads its answer into the value, if there is one.
func (c *Client) doJSON(ctx context.Context, request func() (*http.Request, error), into any) error {
	response, err := c.do(ctx, request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if into == nil {
		return nil
	}
	if err := json.NewDecoder(io.LimitReader(answer{response.Body}, maxAnswerBytes)).Decode(into); err != nil {
		return fmt.Errorf("artifact store's answer: %w", err)
	}
	return nil
}

// do does a request, again and again while that can help and RetryFor is not over. Every request of the protocol can be
// repeated: a lost answer to the first attempt does no harm.
func (c *Client) do(ctx context.Context, request func() (*http.Request, error)) (*http.Response, error) {
	backoff := wait.Backoff{Duration: 100 * time.Millisecond, Factor: 2, Jitter: 0.2, Steps: 8, Cap: 10 * time.Second}
	deadline := time.Now().Add(c.retryFor)
	for {
		response, err := c.attempt(request)
		var status *StatusError
		if err == nil || errors.As(err, &status) && !status.temporary() {
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
	// An answer of another origin, a proxy's for example, or to HEAD has no such body: the status must do.
	data, _ := io.ReadAll(io.LimitReader(response.Body, 64<<10))
	if json.Unmarshal(data, &body) != nil || body.Error == "" {
		body.Error = response.Status
	}
	return &StatusError{Code: response.StatusCode, Message: body.Error}
}
