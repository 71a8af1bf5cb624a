import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;

/** Posts a body with the client of Java's own library, which offers HTTP/2 by `Upgrade`. */
public class JavaClient {
    public static void main(String[] arguments) throws Exception {
        HttpClient client = HttpClient.newHttpClient();
        HttpRequest request = HttpRequest.newBuilder(URI.create(arguments[0]))
                .header("content-type", "application/json")
                .POST(HttpRequest.BodyPublishers.ofString(arguments[1]))
                .build();
        for (int i = 0; i < 3; i++) {
            HttpResponse<String> answer = client.send(request, HttpResponse.BodyHandlers.ofString());
            System.out.println(answer.version() + " " + answer.statusCode() + " " + answer.body());
        }
    }
}
