// SPDX-License-Identifier: Apache-2.0

package hub

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// DefaultEndpoint is the address of the public hub.
const DefaultEndpoint = "https://huggingface.co"

const (
	// maxFailures is the maximum number of consecutive failed requests without a byte of progress.
	maxFailures = 8
	// minPause and maxPause bound the pause between two requests. maxRequestedPause bounds the pause that a server
	// requests.
	minPause          = time.Second
	maxPause          = time.Minute
	maxRequestedPause = 10 * time.Minute
	// stallTime is the maximum time without a byte from the server.
	stallTime = time.Minute
	// maxPage is the maximum size, in bytes, of a JSON response: the hub lists 1,000 files per page.
	maxPage = 8 << 20
	// maxRedirects is the maximum number of redirects of one request.
	maxRedirects = 10
	// maxErrorText is the maximum length, in bytes, of the server's own text in an error.
	maxErrorText = 200
)

// InvalidError is an error that another attempt would repeat: the options are invalid, or the hub has no such model.
type InvalidError struct{ err error }

func (e *InvalidError) Error() string { return e.err.Error() }
func (e *InvalidError) Unwrap() error { return e.err }

func invalidf(format string, args ...any) error {
	return &InvalidError{fmt.Errorf(format, args...)}
}

// temporaryError is an error that another request may avoid, after the pause that the server requests.
type temporaryError struct {
	err   error
	after time.Duration
}

func (e *temporaryError) Error() string { return e.err.Error() }
func (e *temporaryError) Unwrap() error { return e.err }

// Client sends requests to a hub.
type Client struct {
	endpoint *url.URL
	token    string
	http     *http.Client
	stall    time.Duration
	// pause waits between two requests.
	pause func(context.Context, time.Duration) error
}

// NewClient returns a client of the hub at an endpoint. The token may be empty.
func NewClient(endpoint, token string) (*Client, error) {
	parsed, err := url.Parse(endpoint)
	switch {
	case err != nil || parsed.Host == "" || parsed.Scheme != "http" && parsed.Scheme != "https":
		return nil, invalidf("endpoint %q is invalid: a URL such as %s is required", endpoint, DefaultEndpoint)
	case parsed.User != nil || parsed.RawQuery != "" || parsed.Fragment != "":
		return nil, invalidf("endpoint of host %s is invalid: it must contain neither credentials nor a query", parsed.Host)
	}
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.DisableCompression = true // digests and ranges are those of the file, not of an encoding
	c := &Client{endpoint: parsed, token: strings.TrimSpace(token), stall: stallTime, pause: pause}
	c.http = &http.Client{Transport: transport, CheckRedirect: c.checkRedirect}
	return c, nil
}

func pause(ctx context.Context, delay time.Duration) error {
	timer := time.NewTimer(delay)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}

// checkRedirect follows redirects, for example to a content delivery network. net/http would also send the token to
// subdomains, other ports and plain HTTP.
func (c *Client) checkRedirect(request *http.Request, via []*http.Request) error {
	switch {
	case len(via) > maxRedirects:
		return invalidf("the server redirects more than %d times", maxRedirects)
	case request.URL.Scheme != "https" && via[len(via)-1].URL.Scheme == "https":
		return invalidf("the server redirects from https to %s://%s", request.URL.Scheme, request.URL.Host)
	case !c.sameOrigin(request.URL):
		request.Header.Del("Authorization")
	}
	request.Header.Del("Referer") // signed addresses are credentials
	return nil
}

func (c *Client) sameOrigin(u *url.URL) bool {
	return u.Scheme == c.endpoint.Scheme && u.Host == c.endpoint.Host
}

// address returns the URL of escaped path segments below the endpoint.
func (c *Client) address(segments ...string) *url.URL { return c.endpoint.JoinPath(segments...) }

// escaped returns the escaped segments of a path with slashes.
func escaped(path string) []string {
	segments := strings.Split(path, "/")
	for i := range segments {
		segments[i] = url.PathEscape(segments[i])
	}
	return segments
}

// get sends one request for the bytes from offset. The response ends with an error if the server sends nothing for the
// stall time. about describes the object in errors.
func (c *Client) get(ctx context.Context, target *url.URL, offset int64, about string) (*http.Response, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	watchdog := time.AfterFunc(c.stall, func() { cancel(fmt.Errorf("the server sends nothing for %v", c.stall)) })
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, target.String(), nil)
	if err != nil {
		cancel(nil)
		return nil, err
	}
	request.Header.Set("Accept-Encoding", "identity")
	request.Header.Set("User-Agent", "semmoe")
	if c.token != "" && c.sameOrigin(target) {
		request.Header.Set("Authorization", "Bearer "+c.token)
	}
	if offset > 0 {
		request.Header.Set("Range", fmt.Sprintf("bytes=%d-", offset))
	}
	response, err := c.http.Do(request)
	if err != nil {
		watchdog.Stop()
		cause := context.Cause(ctx)
		cancel(nil)
		return nil, c.transportError(about, err, cause)
	}
	response.Body = &watchedBody{ReadCloser: response.Body, watchdog: watchdog, ctx: ctx, cancel: cancel, stall: c.stall}
	if err := c.statusError(response, about); err != nil {
		response.Body.Close()
		return nil, err
	}
	if encoding := response.Header.Get("Content-Encoding"); encoding != "" && encoding != "identity" {
		response.Body.Close()
		return nil, invalidf("failed to read %s: the server encodes it as %q although that is not accepted", about, encoding)
	}
	return response, nil
}

// transportError returns the error of a request without a response. It leaves out the address: after a redirect that
// is a signed one.
func (c *Client) transportError(about string, err, cause error) error {
	var invalid *InvalidError
	if errors.As(err, &invalid) {
		return invalidf("failed to read %s: %w", about, invalid)
	}
	var of *url.Error
	if errors.As(err, &of) {
		err = of.Err
	}
	if cause != nil {
		err = cause
	}
	return &temporaryError{err: fmt.Errorf("failed to read %s from %s: %w", about, c.endpoint.Host, err)}
}

// watchedBody is a response body that ends if the server stalls.
type watchedBody struct {
	io.ReadCloser
	watchdog *time.Timer
	ctx      context.Context
	cancel   context.CancelCauseFunc
	stall    time.Duration
}

func (b *watchedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if n > 0 {
		b.watchdog.Reset(b.stall)
	}
	if err != nil && err != io.EOF {
		if cause := context.Cause(b.ctx); cause != nil {
			err = cause
		}
	}
	return n, err
}

func (b *watchedBody) Close() error {
	b.watchdog.Stop()
	b.cancel(nil)
	return b.ReadCloser.Close()
}

// Codes in the header X-Error-Code of the hub (huggingface_hub, src/huggingface_hub/utils/_http.py,
// hf_raise_for_status).
const (
	codeGated      = "GatedRepo"
	codeNoRevision = "RevisionNotFound"
	codeNoRepo     = "RepoNotFound"
)

// tokenAdvice names the settings of the token.
const tokenAdvice = "spec.model.source.huggingFace.tokenSecretRef, or the variable HF_TOKEN"

// statusError returns the error of a response that is no success.
func (c *Client) statusError(response *http.Response, about string) error {
	status := response.StatusCode
	if status == http.StatusOK || status == http.StatusPartialContent || status == http.StatusRequestedRangeNotSatisfiable {
		return nil
	}
	prefix := fmt.Sprintf("failed to read %s: %s answers %d", about, response.Request.URL.Host, status)
	code := response.Header.Get("X-Error-Code")
	switch {
	case status == http.StatusTooManyRequests || status == http.StatusRequestTimeout || status >= 500:
		return &temporaryError{fmt.Errorf("%s", prefix+serverText(response)), requestedPause(response.Header)}
	case !c.sameOrigin(response.Request.URL): // a signed address expires: the next request gets another one
		return &temporaryError{err: fmt.Errorf("%s", prefix+" after a redirect"+serverText(response))}
	case code == codeGated && c.token == "":
		return invalidf("%s: the repository is gated. Accept its terms on its page, and set a token of that account (%s)", prefix, tokenAdvice)
	case code == codeGated:
		return invalidf("%s: the repository is gated. Accept its terms on its page with the account of the token", prefix)
	case code == codeNoRevision:
		return invalidf("%s: the repository has no such revision", prefix)
	case status == http.StatusUnauthorized && c.token == "":
		return invalidf("%s: the repository does not exist, or needs a token (%s)", prefix, tokenAdvice)
	case status == http.StatusUnauthorized:
		return invalidf("%s: the token is not valid (%s)", prefix, tokenAdvice)
	case status == http.StatusForbidden:
		return invalidf("%s: the token has no access to the repository%s", prefix, serverText(response))
	case code == codeNoRepo && c.token == "":
		return invalidf("%s: the repository does not exist, or is private and needs a token (%s)", prefix, tokenAdvice)
	case code == codeNoRepo:
		return invalidf("%s: the repository does not exist, or the token has no access to it", prefix)
	}
	return invalidf("%s", prefix+serverText(response))
}

// serverText returns the error text of the server, quoted and bounded.
func serverText(response *http.Response) string {
	text := response.Header.Get("X-Error-Message")
	if text == "" {
		return ""
	}
	if len(text) > maxErrorText {
		text = text[:maxErrorText]
	}
	return fmt.Sprintf(": %q", text)
}

// rateLimit matches the seconds until the reset in the header RateLimit (draft-ietf-httpapi-ratelimit-headers), for
// example `"api";r=0;t=55`.
var rateLimit = regexp.MustCompile(`;\s*r=0\s*;\s*t=(\d{1,6})`)

// requestedPause returns the pause that a server requests, or 0.
func requestedPause(header http.Header) time.Duration {
	seconds := header.Get("Retry-After")
	if match := rateLimit.FindStringSubmatch(header.Get("RateLimit")); seconds == "" && match != nil {
		seconds = match[1]
	}
	var delay time.Duration
	if n, err := strconv.Atoi(seconds); err == nil && n >= 0 {
		delay = time.Duration(min(n, int(maxRequestedPause.Seconds()))) * time.Second
	} else if at, err := http.ParseTime(seconds); err == nil {
		delay = time.Until(at)
	}
	return max(0, min(delay, maxRequestedPause))
}

// retry calls try until it succeeds, or fails permanently, or fails maxFailures times without progress.
func (c *Client) retry(ctx context.Context, try func() (progressed bool, err error)) error {
	for failures := 0; ; {
		progressed, err := try()
		var temporary *temporaryError
		if err == nil || ctx.Err() != nil || !errors.As(err, &temporary) {
			return err
		}
		if progressed {
			failures = 0
		}
		if failures++; failures >= maxFailures {
			return fmt.Errorf("%w (%d attempts)", err, failures)
		}
		delay := min(minPause<<(failures-1), maxPause)
		delay += time.Duration(rand.Int64N(int64(delay))) // several Jobs do not retry at the same time
		if err := c.pause(ctx, max(delay, temporary.after)); err != nil {
			return err
		}
	}
}

// getJSON reads a JSON document. It returns the response header.
func (c *Client) getJSON(ctx context.Context, target *url.URL, about string, into any) (http.Header, error) {
	var header http.Header
	err := c.retry(ctx, func() (bool, error) {
		response, err := c.get(ctx, target, 0, about)
		if err != nil {
			return false, err
		}
		defer response.Body.Close()
		header = response.Header
		text, err := io.ReadAll(io.LimitReader(response.Body, maxPage+1))
		switch {
		case err != nil:
			return false, c.transportError(about, err, nil)
		case len(text) > maxPage:
			return false, invalidf("failed to read %s: the response exceeds %d bytes", about, maxPage)
		}
		if err := json.NewDecoder(bytes.NewReader(text)).Decode(into); err != nil {
			return false, invalidf("failed to read %s: %s does not answer in the format of a hub: %w", about, c.endpoint.Host, err)
		}
		return false, nil
	})
	return header, err
}
